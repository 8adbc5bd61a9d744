"""A pack of pairs or of judged answers is checked row by row, and a bad row is named as the pack and as the uploaded file know it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.training.runtime import pack_loader
from engine.training.runtime.run_errors import BadExample, BadInput, BadSpec
from tests.engine.training.attempts import SPEC

VOCAB = 50
IDS = pa.list_(pa.int32())
SEQUENCES = {"dpo": ("chosen_", "rejected_"), "kto": ("", "kl_")}
KIND = {"dpo": "pairs", "kto": "judged"}


def row_of(method: str, number: int) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt_length": 2, "row": 10 * number, "label": number % 2 == 0}
    for prefix in SEQUENCES[method]:
        row[f"{prefix}input_ids"] = [1, 2, 3 + number, 4]
        row[f"{prefix}labels"] = [-100, -100, 3 + number, 4]
    return row


def write(directory: Path, method: str, rows: list[dict[str, Any]], *, kind: str | None = None) -> Path:
    directory.mkdir()
    fields = [("prompt_length", pa.int32()), ("row", pa.int64())] + ([("label", pa.bool_())] if method == "kto" else [])
    fields += [(f"{prefix}{what}", IDS) for prefix in SEQUENCES[method] for what in ("input_ids", "labels")]
    file = directory / "shard-00000.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(fields)), file)
    shards = [{"name": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "num_windows": len(rows)}]
    body = {"fingerprint": SPEC.pack_fingerprint, "kind": kind or KIND[method], "shards": shards, "validation": None}
    (directory / "manifest.json").write_text(json.dumps(body))
    return directory


def load(directory: Path, method: str) -> pack_loader.Pack:
    return pack_loader.load(directory, replace(SPEC, method=method, max_seq_len=6), vocab_size=VOCAB)


@pytest.mark.parametrize("method", KIND)
def test_a_good_pack_is_read_as_it_is(tmp_path: Path, method: str) -> None:
    rows = [row_of(method, n) for n in range(3)]
    pack = load(write(tmp_path / "pack", method, rows), method)
    assert pack.validation is None and pack.train.num_rows == 3
    for found, row in zip(pack.train.whole().to_pylist(), rows, strict=True):
        assert found == {name: row[name] for name in found}


FAULTS: list[tuple[str, Callable[[dict[str, Any], str], None]]] = [
    ("is empty", lambda r, p: r.update({f"{p}input_ids": [], f"{p}labels": []})),
    ("is longer than max_seq_len 6", lambda r, p: r.update({f"{p}input_ids": [1] * 7, f"{p}labels": [-100] + [1] * 6})),
    ("has a different number of labels than tokens", lambda r, p: r[f"{p}labels"].append(1)),
    (f"holds token {VOCAB}, but the vocabulary ends at {VOCAB - 1}", lambda r, p: r[f"{p}input_ids"].__setitem__(0, VOCAB)),
    ("has no token that carries loss", lambda r, p: r.update({f"{p}labels": [-100] * 4})),
    ("has a label on the first token", lambda r, p: r[f"{p}labels"].__setitem__(0, 1)),
    ("has labels that differ from its tokens", lambda r, p: r[f"{p}labels"].__setitem__(3, 5)),
]


@pytest.mark.parametrize("method", KIND)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("why", "spoil"), FAULTS, ids=[w for w, _ in FAULTS])
def test_a_row_that_would_train_on_garbage_is_refused_by_its_number(
    tmp_path: Path, method: str, side: int, why: str, spoil: Callable[[dict[str, Any], str], None]
) -> None:
    rows = [row_of(method, n) for n in range(3)]
    spoil(rows[2], SEQUENCES[method][side])
    with pytest.raises(BadExample) as refused:
        load(write(tmp_path / "pack", method, rows), method)
    word = {"dpo": "pair", "kto": "answer"}[method]
    assert refused.value.message.startswith(f"train {word} 2 (row 20 of the uploaded file): {SEQUENCES[method][side]}")
    assert why in refused.value.message
    assert refused.value.detail == {"split": "train", "row": 2, "uploaded_row": 20}


def test_a_pack_of_another_kind_is_refused(tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs", "dpo", [row_of("dpo", 0)])
    with pytest.raises(BadSpec, match="is a pack of pairs, method kto trains on judged"):
        load(pairs, "kto")
    with pytest.raises(BadSpec, match="is a pack of pairs, method sft trains on windows"):
        load(pairs, "sft")
    disguised = write(tmp_path / "disguised", "dpo", [row_of("dpo", 0)], kind="judged")
    with pytest.raises(BadInput, match="does not have the columns of a pack of judged"):
        load(disguised, "kto")
    with pytest.raises(BadSpec, match="method 'ppo' is not supported"):
        load(pairs, "ppo")
    empty = write(tmp_path / "empty", "dpo", [])
    with pytest.raises(BadExample, match="the pack has no pairs"):
        load(empty, "dpo")
