"""The header of ``pool.safetensors``: built and checked here, byte for byte. Pure.

    8 bytes     length of the header, little endian
    header      JSON, padded with spaces so that the data begins on a multiple of 4096
    data        one tensor ``kv_pages`` of shape [num_pages, *page_shape]

Any safetensors reader opens the file. The library itself accepts duplicate keys and flipped bits, so both are checked by us.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from storage.errors import PoolError

TENSOR = "kv_pages"
FORMAT = "midsentence-pool"
VERSION = "1"
ALIGNMENT = 4096
#: Ours are one block long; the format allows 100 MB, which only an attacker would use.
MAX_HEADER = 64 * 1024
_LENGTH = 8
_DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


@dataclass(frozen=True, slots=True)
class PoolHeader:
    pool_id: str
    model_fingerprint: str
    num_pages: int
    page_shape: tuple[int, ...]
    dtype: str  #: "float32", "float16", "bfloat16"
    data_offset: int  #: where page 0 begins

    @property
    def page_bytes(self) -> int:
        return math.prod(self.page_shape) * _DTYPES[self.dtype][1]

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.num_pages * self.page_bytes

    def differs_from(self, other: "PoolHeader") -> str:
        """Names the first thing in which another geometry or model differs; "" when pages of one can be used in the other."""
        for name in ("model_fingerprint", "dtype", "page_shape", "num_pages"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name.replace('_', ' ')} is {ours}, wanted {theirs}"
        return ""


class NotAPool(PoolError):
    """A well-formed file that was never one of ours: not to be overwritten."""


def build(
    *, pool_id: str, model_fingerprint: str, num_pages: int, page_shape: tuple[int, ...], dtype: str
) -> tuple[PoolHeader, bytes]:
    """The header and its bytes. ValueError for a geometry that makes no sense."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    if num_pages < 1 or not page_shape or any(size < 1 for size in page_shape):
        raise ValueError(f"a pool of {num_pages} pages of shape {page_shape} holds nothing")
    code, width = _DTYPES[dtype]
    shape = [num_pages, *page_shape]
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "pool_id": pool_id,
        "model_fingerprint": model_fingerprint,
        "dtype": dtype,
        "num_pages": str(num_pages),
        "page_shape": json.dumps(list(page_shape)),
    }
    tensor = {"dtype": code, "shape": shape, "data_offsets": [0, math.prod(shape) * width]}
    text = json.dumps({"__metadata__": metadata, TENSOR: tensor}).encode()
    text += b" " * (-(_LENGTH + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise ValueError("the header is too long")
    header = PoolHeader(pool_id, model_fingerprint, num_pages, page_shape, dtype, _LENGTH + len(text))
    return header, len(text).to_bytes(_LENGTH, "little") + text


def header_length(first: bytes, file_bytes: int) -> int:
    """Bytes of header that follow the first eight. PoolError when that cannot be."""
    if len(first) < _LENGTH:
        raise PoolError("the file is shorter than a safetensors header")
    length = int.from_bytes(first[:_LENGTH], "little")
    if not 2 <= length <= min(MAX_HEADER, file_bytes - _LENGTH):
        raise PoolError(f"the header claims to be {length} bytes long")
    return length


def parse(text: bytes, file_bytes: int) -> PoolHeader:
    """Check everything that the library does not. PoolError says what is wrong; NotAPool that the file is somebody else's."""
    if not text.startswith(b"{"):
        raise PoolError("the header does not start with {")
    try:
        values = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise PoolError(f"the header is not valid JSON: {error}") from error
    metadata = values.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise NotAPool("this safetensors file is not a Midsentence pool", "move it away, or use another data directory")
    if metadata.get("version") != VERSION:
        raise NotAPool(f"pool format {metadata.get('version')!r} is not known to this version", "use the version that wrote it")
    return _header(metadata, values, _LENGTH + len(text), file_bytes)


def _header(metadata: dict[str, Any], values: dict[str, Any], data_offset: int, file_bytes: int) -> PoolHeader:
    tensor = values.get(TENSOR)
    if values.keys() != {"__metadata__", TENSOR} or not isinstance(tensor, dict):
        raise PoolError(f"the header must describe {TENSOR} and nothing else")
    if tensor.keys() != {"dtype", "shape", "data_offsets"} or not all(map(_plain, metadata.values())):
        raise PoolError(f"the header describes {TENSOR} in an unknown way")
    dtype = metadata.get("dtype")
    shape = tensor["shape"]
    if dtype not in _DTYPES or tensor["dtype"] != _DTYPES[dtype][0]:
        raise PoolError(f"dtype {tensor['dtype']!r} does not fit {dtype!r}")
    if not isinstance(shape, list) or len(shape) < 2 or not all(type(size) is int and size > 0 for size in shape):
        raise PoolError(f"shape {shape!r} is not that of a pool")
    if metadata.get("num_pages") != str(shape[0]) or metadata.get("page_shape") != json.dumps(shape[1:]):
        raise PoolError("shape and metadata contradict each other")
    if not metadata.get("pool_id") or "model_fingerprint" not in metadata:
        raise PoolError("the header lacks the pool id or the model fingerprint")
    # As text, for false and 0.0 are equal to 0; and before the shape's own size, which may be too long a number to be shown.
    if json.dumps(tensor["data_offsets"]) != json.dumps([0, file_bytes - data_offset]) or data_offset % ALIGNMENT:
        offsets = tensor["data_offsets"]
        raise PoolError(f"data offsets {offsets!r} after a header of {data_offset} bytes do not fit a file of {file_bytes} bytes")
    header = PoolHeader(metadata["pool_id"], metadata["model_fingerprint"], shape[0], tuple(shape[1:]), dtype, data_offset)
    if header.file_bytes != file_bytes:
        raise PoolError(f"the file has {file_bytes} bytes, which is not what {header.num_pages} pages take")
    return header


def _plain(value: Any) -> bool:
    """As everything is that we write: no half of a surrogate pair, which no store takes, reaches anybody."""
    return isinstance(value, str) and value.isascii() and value.isprintable()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key occurs twice")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
