"""``make audit``: no package of the lock files has a vulnerability that is known.

pip-audit passes over what its service does not know, and still ends with 0: behind a mirror of PyPI that has packages alone, every
audit would be a success. So what was not looked up is a failure here, unless ``AUDIT_UNREACHABLE=accept`` says that it is expected.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

LOCKS = ("requirements.lock", "requirements-otel.lock", "requirements-dev.lock")
ACCEPT = "AUDIT_UNREACHABLE"


def verdict(packages: Sequence[Mapping[str, Any]], *, accept_unreachable: bool) -> tuple[int, list[str]]:
    """Exit code and lines for people, from the ``dependencies`` of pip-audit's report; none at all where it had no service."""
    lines = []
    for package in packages:
        for found in package.get("vulns", ()):
            fixed = ", ".join(found["fix_versions"]) or "no version yet"
            lines.append(f"{package['name']} {package['version']}: {found['id']}, fixed in {fixed}")
    if lines:
        return 1, lines
    audited = [package for package in packages if "vulns" in package]
    if packages and len(audited) == len(packages):
        return 0, [f"audited {len(audited)} packages: no known vulnerability"]
    lines = [f"NOT AUDITED: the vulnerability service knew {len(audited)} of {len(packages) or 'all'} packages"]
    if accept_unreachable:
        return 0, [*lines, f"accepted by {ACCEPT}=accept"]
    return 1, [*lines, f"run it where https://pypi.org/pypi/NAME/VERSION/json answers, or accept this with {ACCEPT}=accept"]


def main() -> int:
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--timeout", "10"]
    files = [argument for lock in LOCKS for argument in ("--requirement", lock)]
    done = subprocess.run([*command, "--no-deps", "--disable-pip", *files], capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except ValueError:
        print(done.stderr.strip()[-2000:], file=sys.stderr)
        packages = []
    code, lines = verdict(packages, accept_unreachable=os.environ.get(ACCEPT) == "accept")
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
