"""``python -m tests.simulation --seeds 20000``: run seeds and say what happened. ``--seed`` names the first."""

import argparse
import sys
import time
from collections import Counter

from tests.simulation.seeds import quiet_process, run_seed, scratch
from tests.simulation.world import Failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    failed = 0
    with quiet_process(), scratch() as folder:
        began = time.perf_counter()
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            try:
                counts += run_seed(seed, folder).counts
            except Failed as failure:
                failed += 1
                print(failure)
        seconds = time.perf_counter() - began
    for name, count in sorted(counts.items()):
        print(f"{count:10,}  {name}")
    print(f"{arguments.seeds:,} seeds in {seconds:.1f} s, {arguments.seeds / seconds * 60:,.0f} a minute; {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
