"""``python -m tests.model [WORLD …]``: explore small worlds with the real scripts on a real server. 1 when a promise was broken."""

import argparse
import sys
import time

from tests.model.explorer import explore
from tests.model.scripts import script_store
from tests.model.small import SMALL
from tests.model.world import World


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("world", nargs="*", choices=[[], *SMALL], help="named after the mechanism that it needs; default: all")
    violations = 0
    for name in parser.parse_args().world or SMALL:
        began = time.perf_counter()
        with script_store() as store:
            found = explore(World(store=store, **SMALL[name]))
        print(f"{name}: {found.states:,} states in {time.perf_counter() - began:.1f} s", flush=True)
        if found.violation:
            violations += 1
            print("\n".join(("", *found.path, f"Violation: {found.violation}")))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
