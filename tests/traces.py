"""Looking for a text in whatever lies in a directory."""

from pathlib import Path


def holding(pieces: list[bytes], *folders: Path) -> list[Path]:
    """The files that hold any of the pieces."""
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    contents = {path: path.read_bytes() for path in paths if path.exists()}
    return [path for path, content in contents.items() if any(piece in content for piece in pieces)]


def runs(text: str, length: int = 12) -> list[bytes]:
    """Pieces of a text, one of which is there wherever the text is: Redis packs strings, and of random ones up to 32 bytes stay."""
    return [text[at : at + length].encode() for at in range(0, len(text) - length + 1, 2)]
