"""Benchmarks: ratios measured side by side in one run, medians over interleaved rounds."""
