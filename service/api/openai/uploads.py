"""An upload on its way into the store: multipart/form-data, taken apart as it comes, never whole in memory or in a file of ours."""

import contextlib
import hashlib
import secrets
from dataclasses import dataclass, field

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from service.api import submission
from service.api.context import Context
from service.api.problems import BodyTooLarge, FileStoreFull, InvalidRequest
from storage.batch_records import CHUNK, ChunkOutcome
from storage.errors import StorageError

_MAX_VALUE = 4096  #: bytes of a plain field, of a part's headers and of a file's name
_MAX_PARTS = 16


@dataclass(slots=True)
class _Part:
    headers: dict[str, str] = field(default_factory=dict)
    name: str = ""
    is_file: bool = False
    value: bytearray = field(default_factory=bytearray)


class Form:
    """The parser's callbacks: plain fields in ``values``, what came of the file and was not stored yet in ``pending``."""

    def __init__(self, boundary: bytes) -> None:
        self.values: dict[str, str] = {}
        self.filename: str | None = None
        self.pending = bytearray()
        self.ended = False
        self._part = _Part()
        self._parts = 0
        self._header_name, self._header_value = bytearray(), bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begin,
                "on_part_data": self._part_data,
                "on_part_end": self._part_end,
                "on_header_field": self._header_field,
                "on_header_value": self._header_text,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Raises InvalidRequest."""
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise InvalidRequest(f"the body is not multipart/form-data: {error}", code="invalid_multipart") from None

    def _part_begin(self) -> None:
        self._part = _Part()
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise InvalidRequest(f"the form has more than {_MAX_PARTS} fields", code="invalid_multipart")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]
        self._check(len(self._header_name))

    def _header_text(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        self._check(len(self._header_value))

    def _header_end(self) -> None:
        self._part.headers[self._header_name.decode("latin-1").lower()] = self._header_value.decode("latin-1")
        self._header_name.clear()
        self._header_value.clear()
        self._check(_MAX_VALUE * len(self._part.headers) // _MAX_PARTS)

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._part.headers.get("content-disposition", ""))
        self._part.name = options.get(b"name", b"").decode(errors="replace")
        name = self._part.name
        self._part.is_file = name == "file"
        if name in self.values or (self._part.is_file and self.filename is not None):
            raise InvalidRequest(f"{name[:64]}: this field is given twice", param=name[:64], code="invalid_multipart")
        if self._part.is_file:
            if b"filename" not in options:
                raise InvalidRequest("file: must be sent as a file, with a filename", param="file")
            self.filename = _plain_name(options[b"filename"])

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.is_file:
            self.pending += data[start:end]
        else:
            self._part.value += data[start:end]
            self._check(len(self._part.value))

    def _part_end(self) -> None:
        if not self._part.is_file:
            self.values[self._part.name] = self._part.value.decode(errors="replace")

    def _end(self) -> None:
        self.ended = True

    def _check(self, length: int) -> None:
        if length > _MAX_VALUE:
            raise InvalidRequest(f"a field of the form is longer than {_MAX_VALUE} bytes", code="invalid_multipart")


def _plain_name(filename: bytes) -> str:
    """Without folders or control characters: shown to others, and never a path of ours."""
    name = filename.decode(errors="replace").replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in name if c.isprintable())[:255] or "upload"


class Upload:
    """Stores chunk after chunk. ``form`` is whole once ``receive`` is over."""

    def __init__(self, context: Context, request: Request) -> None:
        kind, options = parse_options_header(request.headers.get("Content-Type", ""))
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= 256:
            raise InvalidRequest("the body must be multipart/form-data, with a boundary", code="invalid_multipart")
        self.upload_id = secrets.token_hex(16)
        self.form = Form(boundary)
        self.chunks = 0
        self.num_bytes = 0
        self._context = context
        self._request = request
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    async def receive(self) -> None:
        """Raises InvalidRequest, BodyTooLarge, FileStoreFull and what ``storage.errors`` names."""
        limit = self._context.options.max_file_bytes
        async for data in self._request.stream():
            self.form.feed(data)
            self.num_bytes = self.chunks * CHUNK + len(self.form.pending)
            if self.num_bytes > limit:
                raise BodyTooLarge(f"file: it is larger than {limit} bytes (--max-file-bytes)", param="file")
            while len(self.form.pending) >= CHUNK:
                await self._store(CHUNK)
        if not self.form.ended:
            raise InvalidRequest("the form ends before its closing boundary", code="invalid_multipart")
        if self.form.pending:
            await self._store(len(self.form.pending))

    async def drop(self) -> None:
        """What was stored of an upload that becomes no file; the sweep does it where the store is away."""
        if self.chunks:
            with contextlib.suppress(StorageError):
                await self._context.store.run(lambda store: store.batches.drop_upload(self.upload_id))

    async def _store(self, size: int) -> None:
        content, number, limit = bytes(self.form.pending[:size]), self.chunks, self._context.options.max_files_bytes
        self.chunks += 1
        outcome = await submission.until_answered(
            self._context, lambda store: store.batches.put_chunk(self.upload_id, number, content, limit=limit)
        )
        if outcome is ChunkOutcome.FULL:
            raise FileStoreFull(
                f"no room: all files together may have {limit} bytes (--max-files-bytes); delete some", param="file"
            )
        self._digest.update(content)
        del self.form.pending[:size]
