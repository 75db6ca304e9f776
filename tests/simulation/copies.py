"""The copies between device and host pages, without their threads."""

from engine.swap import Completed, Transfer

COPY = 0.06  #: mean seconds


class SimSwap:
    """Copies that are made, and reported, at later moments in any order."""

    def __init__(self, life, device, host, hooks) -> None:
        self._life, self._on_completed = life, hooks["on_completed"]
        self.device_bytes = device.bytes.numpy()
        self._mover = life.product.mover(device, host)
        self._running: list[Transfer] = []
        self._done: list[Completed] = []

    @property
    def in_flight(self) -> int:
        return len(self._running) + len(self._done)

    def submit(self, transfer: Transfer) -> None:
        self._running.append(transfer)
        self._life.after(self._life.world.rng.expovariate(1 / COPY), "copy", lambda: self._copy(transfer))

    def _copy(self, transfer: Transfer) -> None:
        self._running.remove(transfer)
        self._done.append(self._mover.move(transfer))
        self._on_completed()

    def completed(self, wait: float = 0.0) -> list[Completed]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        pass
