"""A client of files and batches that rides over restarts: what is sent again finds what it made."""

import hashlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from service.client import ClientError, JobClient, problem_text

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
_PIECE = 1 << 20


class BatchClient(JobClient):
    def upload(self, path: Path, *, idempotency_key: str) -> str:
        """The file's id."""

        def send() -> httpx.Response:
            with path.open("rb") as file:  # from its beginning at each try
                form = {"file": (path.name, file, "application/jsonl")}
                headers = {"Idempotency-Key": idempotency_key}
                return self._http.post("/v1/files", data={"purpose": "batch"}, files=form, headers=headers, timeout=600.0)

        return str(self._ask(send)["id"])

    def create_batch(self, file_id: str, endpoint: str, *, idempotency_key: str) -> dict[str, Any]:
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        return self._answer("POST", "/v1/batches", json=body, headers={"Idempotency-Key": idempotency_key})

    def batch(self, batch_id: str) -> dict[str, Any]:
        return self._answer("GET", _batch_path(batch_id))

    def batches(self, *, limit: int = 20, after: str | None = None) -> dict[str, Any]:
        return self._answer("GET", "/v1/batches", params={"limit": limit, **({"after": after} if after is not None else {})})

    def cancel_batch(self, batch_id: str) -> dict[str, Any]:
        return self._answer("POST", f"{_batch_path(batch_id)}/cancel")

    def download(self, file_id: str, path: Path) -> None:
        """The whole file or none: what is there under the name stays until all has come."""
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with self._http.stream("GET", f"/v1/files/{quote(file_id, safe='')}/content", timeout=600.0) as response:
                if not response.is_success:
                    response.read()
                    raise ClientError(problem_text(response))
                with part.open("wb") as file:
                    for piece in response.iter_bytes():
                        file.write(piece)
            part.replace(path)
        except httpx.TransportError as error:
            raise ClientError(f"the download of {file_id} broke off: {error}", "download it again") from error
        finally:
            part.unlink(missing_ok=True)


def key_of(path: Path) -> str:
    """The same content has the same key."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return f"batch-run-{digest.hexdigest()}"


def _batch_path(batch_id: str) -> str:
    return f"/v1/batches/{quote(batch_id, safe='')}"
