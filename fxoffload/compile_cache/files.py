"""Files of the compile cache: read whole or not at all, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .describe import Json, canonical

log = logging.getLogger("fxoffload")

_SUFFIX = ".fxo"
_HEAD = "fxoffload compile cache"
# Above this the files that were not used for longest go.
MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Files:
    """Entries under `folder`, one file each, named by the digest of its key. Each holds the whole key, which is compared."""

    folder: Path
    most_bytes: int = MOST_BYTES

    def path(self, key: Json) -> Path:
        """The file of `key`, there or not."""
        return self.folder / f"{hashlib.sha256(canonical(key).encode()).hexdigest()}{_SUFFIX}"

    def read(self, key: Json) -> dict[str, Json] | None:
        """The entry stored under `key`, None when there is none. A file that is damaged or has another key is as good as none: a warning."""
        path = self.path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("compile cache: %s cannot be read (%s)", path, error.strerror or error)
            return None
        entry = _entry(content, canonical(key).encode())
        if entry is None:
            log.warning("compile cache: %s is damaged or not of this cache; it is made anew", path)
            return None
        try:
            os.utime(path)
        except OSError:
            log.debug("compile cache: %s keeps its date", path)
        return entry

    def write(self, key: Json, entry: dict[str, Json]) -> None:
        """Stores `entry`. A folder that cannot be written to is a warning."""
        body = canonical(key).encode() + b"\n" + canonical(entry).encode() + b"\n"
        head = f"{_HEAD} {hashlib.sha256(body).hexdigest()}\n".encode()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _replace(self.path(key), head + body)
            self._make_room()
        except OSError as error:
            log.warning("compile cache: nothing can be stored in %s (%s)", self.folder, error.strerror or error)

    def _make_room(self) -> None:
        found = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            try:
                status = path.stat()
            except FileNotFoundError:  # another process made room
                continue
            found.append((status.st_mtime_ns, path.name, status.st_size, path))
        excess = sum(size for _, _, size, _ in found) - self.most_bytes
        for _, _, size, path in sorted(found)[:-1]:
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size


def _entry(content: bytes, key: bytes) -> dict[str, Json] | None:
    head, _, body = content.partition(b"\n")
    if head != f"{_HEAD} {hashlib.sha256(body).hexdigest()}".encode():
        return None
    stored_key, _, stored = body.partition(b"\n")
    if stored_key != key:
        return None
    entry = json.loads(stored)
    return entry if isinstance(entry, dict) else None


def _replace(path: Path, content: bytes) -> None:
    # A name of its own: of two processes that write the same entry, each moves a whole file into place.
    handle, partial = tempfile.mkstemp(prefix=".", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)
