"""Text to token rows to batches. Every batch is a pure function of its number, so one int is the whole data position."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from fxoffload.training.config import DataConfig

IGNORED_LABEL = -100  # torch.nn.functional.cross_entropy's default ignore_index
DOCUMENTS_PER_CALL = 256  # bounds the tokenizer's working memory; larger calls are not faster
Row = np.ndarray  # int32[length]


class Tokenizer(Protocol):
    """What this module needs of a transformers tokenizer."""

    eos_token_id: int | None
    pad_token_id: int | None

    def __call__(self, text: list[str], *, add_special_tokens: bool, verbose: bool) -> dict[str, list[list[int]]]: ...


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches 0, 1, 2, ... without end: number n is epoch n // per_epoch, and each epoch is its own shuffle of `rows`."""

    rows: tuple[Row, ...]
    config: DataConfig
    pad_token_id: int

    @property
    def per_epoch(self) -> int:
        """Batches in one epoch; a smaller last one counts unless `drop_last`."""
        whole, rest = divmod(len(self.rows), self.config.batch_size)
        return whole + (1 if rest and not self.config.drop_last else 0)

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        """int64 `input_ids` and `labels` [rows, length]; `attention_mask` too where rows are padded, not packed."""
        epoch, index = divmod(number, self.per_epoch)
        seed = self.config.seed if self.config.shuffle else None
        order = epoch_order(len(self.rows), seed, epoch)
        chosen = order[index * self.config.batch_size : (index + 1) * self.config.batch_size]
        return self.collate([self.rows[i] for i in chosen])

    def largest_batch(self) -> dict[str, torch.Tensor]:
        """A batch of the largest shape this data can give: what the plan is made for."""
        return self.collate([np.resize(row, self.config.seq_len) for row in self._first_rows()])

    def collate(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """The batch of `rows`: stacked where packed, else padded on the right to the longest, with labels -100 there."""
        if self.config.packing:
            ids = torch.from_numpy(np.stack(rows).astype(np.int64))
            return {"input_ids": ids, "labels": ids.clone()}
        return _pad(rows, self.pad_token_id, self._padded_length(max(map(len, rows))))

    def fingerprint(self) -> str:
        """sha256 over the tokens and everything that decides their order: equal fingerprints give equal batches."""
        digest = hashlib.sha256()
        settings = self.config
        order = (settings.seq_len, settings.batch_size, settings.packing, settings.shuffle, settings.seed, settings.drop_last,
                 settings.pad_to_multiple_of, self.pad_token_id)
        digest.update(json.dumps(order).encode())
        for row in self.rows:
            digest.update(len(row).to_bytes(8, "little") + row.tobytes())
        return digest.hexdigest()

    def largest_token(self) -> int:
        """The largest token id: it must be below the model's vocabulary size."""
        return max(int(row.max()) for row in self.rows)

    def _first_rows(self) -> list[Row]:
        return [self.rows[i % len(self.rows)] for i in range(self.config.batch_size)]

    def _padded_length(self, longest: int) -> int:
        multiple = self.config.pad_to_multiple_of
        return min(-(-longest // multiple) * multiple, self.config.seq_len)


@functools.lru_cache(maxsize=4)
def epoch_order(n_rows: int, seed: int | None, epoch: int) -> tuple[int, ...]:
    """The row order of `epoch`: a pure function of the arguments on every machine; `seed` None keeps the files' order."""
    if seed is None:
        return tuple(range(n_rows))
    draw = random.Random(f"{seed}:{epoch}")  # text seeds and random() are the parts Python promises to reproduce
    keys = [draw.random() for _ in range(n_rows)]
    return tuple(sorted(range(n_rows), key=keys.__getitem__))


def load_batches(paths: Sequence[Path], tokenizer: Tokenizer, config: DataConfig) -> Batches:
    """The batches of the text in `paths`. Raises ValueError, naming file and line, for text that cannot be used."""
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError("tokenizer: it has no end-of-text token (eos_token), which separates documents")
    documents = (ids for path in paths for ids in _tokenize(path, tokenizer, config, end))
    rows = pack(documents, config.seq_len) if config.packing else split(documents, config.seq_len)
    batches = Batches(rows, config, end if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
    if batches.per_epoch == 0:
        raise ValueError(
            f"data: {', '.join(map(str, paths))} give {len(rows)} rows of up to {config.seq_len} tokens, too few for one batch of "
            f"{config.batch_size}; add text, or lower data.seq_len or data.batch_size"
        )
    return batches


def hold_out(batches: Batches, fraction: float) -> tuple[Batches, Batches]:
    """(training, held out): the last `fraction` of the rows, at least one batch, leaves the training rows."""
    size = batches.config.batch_size
    n_held = max(round(len(batches.rows) * fraction), size)
    if len(batches.rows) - n_held < size:
        raise ValueError(f"eval.fraction: {fraction} of {len(batches.rows)} rows leaves less than one training batch of {size}")
    kept = Batches(batches.rows[:-n_held], batches.config, batches.pad_token_id)
    return kept, Batches(batches.rows[-n_held:], batches.config, batches.pad_token_id)


def pack(documents: Iterator[Row], seq_len: int) -> tuple[Row, ...]:
    """The documents end to end in rows of exactly `seq_len` tokens; the last, incomplete row is dropped."""
    pieces = list(documents)
    tokens = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
    whole = len(tokens) // seq_len * seq_len
    return tuple(tokens[:whole].reshape(-1, seq_len))


def split(documents: Iterator[Row], seq_len: int) -> tuple[Row, ...]:
    """One row per document; a longer one continues in further rows. One-token rows, which predict nothing, are dropped."""
    rows = (ids[start : start + seq_len] for ids in documents for start in range(0, len(ids), seq_len))
    return tuple(row for row in rows if len(row) > 1)


def read_documents(path: Path, config: DataConfig) -> Iterator[str]:
    """The non-empty documents of a .txt or .jsonl file. Raises ValueError that names the file, and the line of bad JSON."""
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"data.paths: {path} is neither .txt nor .jsonl")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.paths: {path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ValueError(f"data.paths: {path} cannot be read: {error.strerror}") from error
    documents = _json_documents(path, text, config.field) if path.suffix == ".jsonl" else _text_documents(text, config)
    return (document for document in documents if document.strip())


def _text_documents(text: str, config: DataConfig) -> Iterator[str]:
    if config.documents == "file":
        return iter((text,))
    return iter(text.splitlines() if config.documents == "line" else re.split(r"\n\s*\n", text.strip("\n")))


def _json_documents(path: Path, text: str, field: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON text may hold U+2028 unescaped
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise ValueError(f"{path}:{number}: no text in field {field!r}; data.field names the field to train on")
        yield record[field]


def _tokenize(path: Path, tokenizer: Tokenizer, config: DataConfig, end: int) -> Iterator[Row]:
    documents = list(read_documents(path, config))
    for start in range(0, len(documents), DOCUMENTS_PER_CALL):
        encoded = tokenizer(documents[start : start + DOCUMENTS_PER_CALL], add_special_tokens=False, verbose=False)
        for ids in encoded["input_ids"]:
            yield np.array([*ids, end], dtype=np.int32)


def _pad(rows: Sequence[Row], pad_token_id: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.full((len(rows), length), pad_token_id, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED_LABEL)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        tokens = torch.from_numpy(row.astype(np.int64))
        ids[i, : len(row)] = tokens
        labels[i, : len(row)] = tokens
        mask[i, : len(row)] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}
