"""What durability costs and what it gives: ``python -m benchmarks.durability [--quick] [--sections throughput,kill]``."""
