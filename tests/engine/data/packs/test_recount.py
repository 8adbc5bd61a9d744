"""A pack counted again from its files: exact after packing, and every wrong count or length is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.data.packs.build import PackSettings, build_judged_pack, build_pack, build_preference_pack
from engine.data.packs.recount import recounted_differences
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from tests.engine.data.examples_of import varied_chats
from tests.engine.data.preferences_of import varied_judged, varied_preferences

SETTINGS = PackSettings(max_seq_len=1024, shard_examples=16, validation_fraction=0.2)
PACKS: dict[str, tuple[Callable[..., Any], Callable[[int], Any], str]] = {
    "windows": (build_pack, varied_chats, ""),
    "one a window": (build_pack, varied_chats, ""),
    "pairs": (build_preference_pack, varied_preferences, "rejected_"),
    "judged": (build_judged_pack, varied_judged, ""),
}


@pytest.fixture(params=PACKS)
def pack(request: pytest.FixtureRequest, tokenizer: ChatTokenizer, tmp_path: Path) -> tuple[Path, str]:
    """A packed directory, and the prefix of the columns that are tampered with."""
    build, examples, prefix = PACKS[request.param]
    settings = replace(SETTINGS, packing=request.param != "one a window")
    build(examples(100), tokenizer, settings, tmp_path, dataset_id="ds_1")
    return tmp_path, prefix


def change(path: Path, column: str, edit: Callable[[list[Any]], list[Any]]) -> None:
    """Edit a column of one file."""
    table = pq.read_table(path)
    place = table.schema.get_field_index(column)
    values = pa.array(edit(table[column].to_pylist()), type=table.schema.field(column).type)
    pq.write_table(table.set_column(place, table.schema.field(column), values), path)


def test_every_kind_of_pack_is_exact(pack: tuple[Path, str]) -> None:
    assert recounted_differences(pack[0]) == []
    assert list(pack[0].glob("val-*.parquet")), "there is a validation part to count"


@pytest.mark.parametrize(("file", "part"), [("shard-00000.parquet", "training"), ("val-00000.parquet", "validation")])
def test_a_missing_row_is_counted_in_its_part(pack: tuple[Path, str], file: str, part: str) -> None:
    path = pack[0] / file
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)
    found = recounted_differences(pack[0])
    assert {one.partition(": ")[0] for one in found} == {part}
    for name in ("num_windows", "num_examples", "num_tokens", "num_trained_tokens"):
        assert any(one.startswith(f"{part}: {name} is ") for one in found), found


def test_a_label_that_lost_its_loss_is_missed(pack: tuple[Path, str]) -> None:
    change(pack[0] / "shard-00000.parquet", f"{pack[1]}labels", lambda rows: [[-100] * len(rows[0]), *rows[1:]])
    (found,) = recounted_differences(pack[0])
    assert found.startswith("training: num_trained_tokens is ")


def test_tokens_without_a_label_are_named_with_their_row(pack: tuple[Path, str]) -> None:
    change(pack[0] / "shard-00000.parquet", f"{pack[1]}labels", lambda rows: [rows[0], rows[1][:-1], *rows[2:]])
    assert (
        f"training: shard-00000.parquet: {pack[1]}labels and tokens differ in number in 1 rows, the first is row 1"
        in recounted_differences(pack[0])
    )


def test_a_row_over_the_limit_is_named(pack: tuple[Path, str]) -> None:
    for column in ("input_ids", "labels"):
        change(pack[0] / "shard-00000.parquet", f"{pack[1]}{column}", lambda rows: [[7] * 1025, *rows[1:]])
    assert f"training: shard-00000.parquet: {pack[1]}more than 1024 tokens in 1 rows, the first is row 0" in recounted_differences(pack[0])


def test_examples_that_do_not_fill_their_window_are_named(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    build_pack(varied_chats(100), tokenizer, SETTINGS, tmp_path, dataset_id="ds_1")
    change(tmp_path / "shard-00000.parquet", "seq_lengths", lambda rows: [[rows[0][0] + 1, *rows[0][1:]], *rows[1:]])
    (found,) = recounted_differences(tmp_path)
    assert "the lengths of the examples do not add up to the window in 1 rows, the first is row 0" in found
