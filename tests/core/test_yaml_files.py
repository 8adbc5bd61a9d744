"""YAML files of operators: read into dataclasses, and refused with the place of the mistake."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import ConfigDict, Field, TypeAdapter

from core import yaml_files


@dataclass(frozen=True, kw_only=True, slots=True)
class Shelf:
    __pydantic_config__ = ConfigDict(extra="forbid")

    num_books: Annotated[int, Field(strict=True, ge=1, alias="books")]
    label: str = ""

    def __post_init__(self) -> None:
        if self.label == "spare" and self.num_books > 1:
            raise ValueError(f"a spare shelf has one book, not {self.num_books}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    __pydantic_config__ = ConfigDict(extra="forbid")

    shelves: dict[str, list[Shelf]]


def test_a_file_becomes_a_dataclass(tmp_path: Path) -> None:
    (tmp_path / "room.yaml").write_text("shelves: {left: [{books: 3, label: maps}]}")
    found = yaml_files.read(tmp_path / "room.yaml", TypeAdapter(Room), setting="FT_ROOM")
    assert found == Room(shelves={"left": [Shelf(num_books=3, label="maps")]})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("shelves: {left: [{books: 0}]}", "room.yaml: shelves.left[0].books is 0: input should be greater than or equal to 1"),
        ("shelves: {left: [{books: true}]}", "room.yaml: shelves.left[0].books is True: input should be a valid integer"),
        ("shelves: {left: [{books: 2, colour: red}]}", "room.yaml: shelves.left[0]: colour is unknown; it has books, label"),
        ("shelves: {left: [{label: maps}]}", "room.yaml: shelves.left[0]: books is missing"),
        ("shelves: {left: [{books: 2, label: spare}]}", "room.yaml: shelves.left[0]: a spare shelf has one book, not 2"),
        ("shelves: {left: 5}", "room.yaml: shelves.left is 5: input should be a valid list"),
        ("doors: 2", "room.yaml: shelves is missing"),
        ("5", "room.yaml is 5: input should be a dictionary"),
        ("shelves: {left: [{books: 1, label: [" + "x" * 200 + "]}]}", "shelves.left[0].label is ['" + "x" * 78 + ": input should be"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_what_is_allowed(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "room.yaml").write_text(text)
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the whole message is compared
        yaml_files.read(tmp_path / "room.yaml", TypeAdapter(Room), setting="FT_ROOM")
    assert says in str(refused.value)


def test_a_file_that_cannot_be_read_names_its_setting(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("shelves: [")
    for name in ("broken.yaml", "absent.yaml"):
        with pytest.raises(ValueError, match=rf"{name} cannot be read: (.|\n)*; FT_ROOM names that file"):
            yaml_files.read(tmp_path / name, TypeAdapter(Room), setting="FT_ROOM")
