"""What is tried: scripts of faults, each under which load, how often for each tier, and what must hold beyond the usual."""

from chaos.scenarios import clocks, crowds, disk, engines, jobs, kills, long, machine, pages, partitions, redis, strangers, whole

SCENARIOS = (
    *kills.SCENARIOS, *whole.SCENARIOS, *engines.SCENARIOS, *redis.SCENARIOS, *partitions.SCENARIOS, *pages.SCENARIOS,
    *disk.SCENARIOS, *strangers.SCENARIOS, *jobs.SCENARIOS, *crowds.SCENARIOS, *long.SCENARIOS, *machine.SCENARIOS,
    *clocks.SCENARIOS,
)  # fmt: skip
