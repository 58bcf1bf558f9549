"""Packing and padding to the token, and an order that is a pure function of seed and epoch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fxoffload.training.config import DataConfig
from fxoffload.training.data import Batches, epoch_order, hold_out, load_batches, pack, split

EOS = 9


class Letters:
    """A tokenizer of the letters a to i: token i is letter i, 9 ends a text."""

    eos_token_id: int | None = EOS
    pad_token_id: int | None = None

    def __call__(self, text: list[str], **_: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [["abcdefghi".index(letter) for letter in part] for part in text]}


def load(tmp_path: Path, lines: list[str], **changes: object) -> Batches:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    settings = {"paths": (path,), "seq_len": 4, "batch_size": 2, "shuffle": False, "pad_to_multiple_of": 1} | changes
    return load_batches((path,), Letters(), DataConfig(**settings))


def test_packing_joins_documents_with_the_end_token_and_drops_the_rest(tmp_path: Path) -> None:
    batch = load(tmp_path, ["abc", "de", "fghi"]).batch(0)
    assert batch["input_ids"].tolist() == [[0, 1, 2, EOS], [3, 4, EOS, 5]]  # g h i and its end token fill no row
    assert batch["labels"].equal(batch["input_ids"])
    assert "attention_mask" not in batch


def test_padding_masks_the_padding_and_labels_it_minus_100(tmp_path: Path) -> None:
    batch = load(tmp_path, ["a", "bc"], packing=False).batch(0)
    assert batch["input_ids"].tolist() == [[0, EOS, EOS], [1, 2, EOS]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[0, EOS, -100], [1, 2, EOS]]


def test_padded_lengths_round_up_but_never_above_seq_len(tmp_path: Path) -> None:
    batches = load(tmp_path, ["a", "bcdef"], packing=False, seq_len=6, pad_to_multiple_of=4)
    assert batches.batch(0)["input_ids"].shape == (2, 6)


def test_a_document_longer_than_a_row_continues_in_the_next(tmp_path: Path) -> None:
    assert [row.tolist() for row in load(tmp_path, ["abcdef"], packing=False).rows] == [[0, 1, 2, 3], [4, 5, EOS]]


def test_packed_rows_hold_every_token_of_the_stream() -> None:
    documents = [np.arange(n, dtype=np.int32) for n in (3, 0, 7, 11)]
    assert np.concatenate(pack(iter(documents), 7)).tolist() == np.concatenate(documents).tolist()


def test_rows_of_one_token_are_dropped_as_they_predict_nothing() -> None:
    assert split(iter([np.arange(5, dtype=np.int32)]), 4)[0].tolist() == [0, 1, 2, 3]


def test_each_epoch_holds_every_row_once_in_its_own_order() -> None:
    first, second = epoch_order(50, 7, 0), epoch_order(50, 7, 1)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != epoch_order(50, 8, 0)


def test_the_order_is_the_same_in_every_version() -> None:
    assert epoch_order(8, 0, 0) == (3, 5, 7, 1, 2, 0, 4, 6)


def test_a_batch_depends_on_its_number_alone(tmp_path: Path) -> None:
    lines = ["abcdefgh"] * 9
    batches, again = (load(tmp_path, lines, shuffle=True, packing=False) for _ in range(2))
    forward = [batches.batch(i)["input_ids"] for i in range(30)]
    assert all(torch.equal(again.batch(i)["input_ids"], forward[i]) for i in reversed(range(30)))


def test_the_smaller_last_batch_is_kept_unless_dropped(tmp_path: Path) -> None:
    lines = ["abc"] * 5
    assert load(tmp_path, lines).per_epoch == 2
    kept = load(tmp_path, lines, drop_last=False)
    assert (kept.per_epoch, len(kept.batch(2)["input_ids"]), len(kept.batch(3)["input_ids"])) == (3, 1, 2)


def test_no_batch_is_larger_than_the_largest(tmp_path: Path) -> None:
    for packing in (True, False):
        batches = load(tmp_path, ["ab", "abcdefgh", "a"] * 3, packing=packing)
        assert batches.largest_batch()["input_ids"].shape == (2, 4)
        assert batches.largest_batch().keys() == batches.batch(0).keys()


def test_held_out_rows_leave_the_training_rows(tmp_path: Path) -> None:
    training, held = hold_out(load(tmp_path, ["abc"] * 10), 0.3)
    assert (len(training.rows), len(held.rows)) == (7, 3)


def test_the_fingerprint_changes_with_text_and_settings(tmp_path: Path) -> None:
    batches = load(tmp_path, ["abc"] * 4)
    other_seed = dataclasses.replace(batches, config=dataclasses.replace(batches.config, seed=1))
    assert len({batches.fingerprint(), other_seed.fingerprint(), load(tmp_path, ["abd"] * 4).fingerprint()}) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", b'{"text": "abc"}\n{"text"', r"t\.jsonl:2: not JSON"),
        ("t.jsonl", b'{"txt": "abc"}', r"t\.jsonl:1: no text in field 'text'; data.field names"),
        ("t.txt", b"\xff\xfe", "not UTF-8"),
        ("t.csv", b"abc", "neither .txt nor .jsonl"),
        ("t.txt", b"abc", "give 1 rows of up to 4 tokens, too few for one batch of 2"),
        ("t.txt", b"", "too few"),
    ],
)
def test_unusable_text_is_one_error_that_names_file_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_batches((path,), Letters(), DataConfig((path,), seq_len=4, batch_size=2))


def test_paragraphs_and_lines_of_a_text_file_can_be_documents(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("abcd\n \n\nef\n")
    for documents in ("paragraph", "line"):
        config = DataConfig((path,), seq_len=5, batch_size=1, packing=False, shuffle=False, documents=documents)
        assert [row.tolist() for row in load_batches((path,), Letters(), config).rows] == [[0, 1, 2, 3, EOS], [4, 5, EOS]]
