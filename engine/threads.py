"""How threads wait for each other. Must be imported before torch: the OpenMP library reads its settings when it is loaded.

libgomp lets a waiting thread spin for 300,000 rounds, milliseconds, before it sleeps. That is the fastest when nothing else
runs; but a spinning thread keeps the core from the very thread it waits for as soon as there are more runnable threads than
cores, and our engine shares its machine with the api and with Redis. Measured on two cores beside one busy process, decode at
batch 1 / batch 8, prefill, tok/s: 30,000 rounds 1 / 5 / 34; 10,000 rounds 2 / 11 / 56; 3,000 rounds 9 / 28 / 90;
**1,000 rounds 16 / 80 / 270**; 300 rounds 9 / 75 / 240.
"""

import os

SPIN_ROUNDS = "1000"


def limit_spinning() -> None:
    """Let threads of this process, and of those it starts, spin briefly. Leaves alone what the user has set."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_ROUNDS)


def default_threads() -> int:
    """Threads for arithmetic where nobody says: torch's own choice, one for each physical core."""
    import torch

    return torch.get_num_threads()


limit_spinning()
