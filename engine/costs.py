"""What moving a page and computing a row take on this machine, measured while it runs."""

from engine.swap import Completed, Direction

_WEIGHT = 0.1  #: of the newest measurement: a handful of disturbed ones must not turn the choice


class Costs:
    """Running means, in seconds. What was never measured counts as 0: it is tried once, and then known."""

    def __init__(self) -> None:
        self.page: dict[Direction, float] = dict.fromkeys(Direction, 0.0)
        self.prompt_row = 0.0
        self.generated_row = 0.0

    def copied(self, done: Completed) -> None:
        direction = done.transfer.direction
        self.page[direction] = _mean(self.page[direction], done.seconds / len(done.transfer.moves))

    def computed_prompt(self, rows: int, seconds: float) -> None:
        self.prompt_row = _mean(self.prompt_row, seconds / rows)

    def computed_generated(self, rows: int, seconds: float) -> None:
        self.generated_row = _mean(self.generated_row, seconds / rows)

    def swap_seconds(self, pages_out: int, pages_in: int) -> float:
        return pages_out * self.page[Direction.OUT] + pages_in * self.page[Direction.IN]

    def replay_seconds(self, prompt_rows: int, generated_rows: int) -> float:
        return prompt_rows * self.prompt_row + generated_rows * self.generated_row


def _mean(before: float, now: float) -> float:
    return now if not before else before + _WEIGHT * (now - before)
