"""Whether a file's lines can be a batch: each is judged as its endpoint would judge it, before any job is made."""

import hashlib

from service.api.openai.batch_lines import Line, LineRefused, jobs_of_line, parse_line
from service.api.openai.surface import Surface
from storage.batch_records import BatchError, BatchRecord

#: OpenAI's limit. What is remembered of each line is a digest of its name: 5 MiB for all.
MAX_LINES = 50_000
#: Mistakes that are told; a file with more is not read to its end.
_MAX_ERRORS = 100


class Validation:
    def __init__(self, surface: Surface, batch: BatchRecord) -> None:
        self.total = 0
        self._surface = surface
        self._batch = batch
        self._errors: list[BatchError] = []
        self._names: set[bytes] = set()

    async def take(self, line: Line) -> bool:
        """False: more need not be read. Raises what ``storage.errors`` names."""
        self.total = line.number
        if line.number > MAX_LINES:
            self._errors.append(BatchError("too_many_lines", f"a batch has at most {MAX_LINES} lines"))
            return False
        try:
            asked = parse_line(line, self._batch.endpoint)
            self._check_name(asked.custom_id)
            await jobs_of_line(self._surface, self._batch, line.number, asked)
        except LineRefused as error:
            self._errors.append(BatchError(error.code, error.message, error.param, line.number))
        return len(self._errors) < _MAX_ERRORS

    def _check_name(self, custom_id: str) -> None:
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._names:
            raise LineRefused("duplicate_custom_id", f"custom_id: {custom_id[:80]!r} is that of an earlier line", "custom_id")
        self._names.add(digest)

    def errors(self) -> list[BatchError]:
        return self._errors if self.total else [BatchError("empty_file", "the file has no line")]
