"""Which model the service runs: the demo model, a folder, or a tiny random one that starts fast."""

import subprocess
import sys
from pathlib import Path

from chaos.place import ROOT

_MAKE = "import sys; from pathlib import Path; from tests.tiny_models import make_tiny_model; make_tiny_model(Path(sys.argv[1]))"


def model_for(name: str, folder: Path) -> str:
    """What ``--model`` is to be. ``tiny`` is made in a process of its own: the driver imports no torch."""
    if name != "tiny":
        return name
    place = folder / "tiny-model"
    subprocess.run([sys.executable, "-c", _MAKE, str(place)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return str(place)
