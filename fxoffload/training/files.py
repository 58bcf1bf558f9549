"""Files that are whole or absent: contents reach the disk before their final name does."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path


def write_json(path: Path, value: object) -> None:
    """`value` as JSON in `path`, replaced atomically; a failed write leaves the old file. Raises OSError naming `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        sync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, f"{path}: cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Returns when the contents of the file or folder `path` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
