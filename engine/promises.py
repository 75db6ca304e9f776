"""Pages on their way to the device, by computing or by copying: others wait for them instead of making them a second time."""


class Promises:
    """Which Sequence will bring which identity. A promise ends when it is kept, or when its Sequence leaves the device."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        self._given: dict[str, set[str]] = {}

    def give(self, identity: str, sequence_id: str) -> None:
        """The first one to promise a page is the one to wait for."""
        if self._owners.setdefault(identity, sequence_id) == sequence_id:
            self._given.setdefault(sequence_id, set()).add(identity)

    def keep(self, identity: str, sequence_id: str) -> None:
        if self._owners.get(identity) == sequence_id:
            del self._owners[identity]
            self._given[sequence_id].discard(identity)

    def withdraw(self, sequence_id: str) -> None:
        for identity in self._given.pop(sequence_id, ()):
            del self._owners[identity]

    def by_another(self, identity: str, sequence_id: str) -> bool:
        return self._owners.get(identity, sequence_id) != sequence_id

    @property
    def owners(self) -> set[str]:
        return set(self._owners.values())
