"""What the machine has for the service, and what not: memory, descriptors, places to write to."""

from chaos.disk import no_mounts
from chaos.faults.memory import OutOfMemory
from chaos.faults.signals import KillEverything
from chaos.faults.starts import Flood, OpenMask, open_to_others, refused_starts
from chaos.guarantees import check_undisturbed
from chaos.memory import MemoryGroup, no_memory_group
from chaos.scenario import Scenario, counts, random_moment, serve
from chaos.stage import Stage


def oom_kills(stage: Stage, kills: int) -> None:
    """The kernel's SIGKILL may be the work of a job, so it is a crash. A job that goes on in between lives through any number."""
    group = _memory_group(stage)
    serve(stage)
    with stage.traffic():
        for _ in range(kills):
            stage.wait_progress(40)  # no random moment: three crashes without a token between are a poison job's
            stage.pause(0.0, 0.6)
            stage.inflict(OutOfMemory(group))


def _memory_group(stage: Stage) -> MemoryGroup:
    group = MemoryGroup()
    stage.resources.callback(group.close)
    stage.cluster.preludes["serve"] = group.prelude
    return group


def poor_starts(stage: Stage, starts: int) -> None:
    """Something is missing, and the start is refused; it is there again, and every job goes on. No file is ever anybody else's."""
    cluster = stage.cluster
    stage.inflict(OpenMask())
    stage.watch_engine(cluster.main)
    refused = refused_starts(cluster.main.data_dir)
    with stage.traffic():
        for number in range(starts):
            random_moment(stage)
            stage.inflict(KillEverything())
            stage.inflict(refused[number % len(refused)])
            cluster.serve()
            stage.wait_progress(20)
            if number % len(refused) == 0:
                stage.inflict(Flood())
                stage.wait_progress(20)
            if open_files := open_to_others(cluster.main.data_dir):
                stage.violate("G6", "others may touch what is in the data directory", evidence=", ".join(open_files))


SCENARIOS = (
    Scenario(
        "oom_kills",
        oom_kills,
        runs=counts(1, 4, 6),
        faults=counts(2, 5, 10),
        covers="S7",
        meaning="the engine is killed by the kernel for want of memory: counted as a crash, and no job fails",
        checkers=(check_undisturbed,),
        cannot_run=no_memory_group,
    ),
    Scenario(
        "poor_starts",
        poor_starts,
        runs=counts(1, 1, 3),
        faults=counts(1, 10, 20),
        covers="S37",
        meaning="few open files, no temporary directory, a read-only one: refused with the fix; umask 000: files are private",
        cannot_run=lambda: no_mounts("unshare"),
    ),
)
