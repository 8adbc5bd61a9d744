"""The figures of the house are counted as their docstring says, and what is bound stays bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import house


@pytest.fixture(scope="module")
def figures() -> dict[str, object]:
    return house.measured()


def test_packages_of_the_engine_are_entered_by_their_doors(figures: dict[str, dict[str, int]]) -> None:
    assert figures["doors"] == {
        "engine.adapters": 1, "engine.data": 1, "engine.evals": 1, "engine.scheduler": 1,
        "engine.training": 3,  # evaluations and exports load models as they were trained: its decoder and its split weights
    }  # fmt: skip


def test_the_house_has_no_cycle_and_the_control_plane_knows_no_asset(figures: dict[str, object]) -> None:
    assert figures["largest_cycle"] == 1
    assert figures["control_plane_into_assets"] == 0
    assert figures["assets_into_control_plane"] == ["ft_assets.datasets.pack_cache", "ft_assets.definitions"]


def test_imports_for_types_alone_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.b import c\ndef f():\n    from a import b\n    import a.d\n"
    )
    modules = {"a": "", "a.b": "", "a.d": ""}
    assert sorted(house._imports(file, "one", modules)) == ["a.b", "a.d"]


def test_a_cycle_is_found_through_any_number_of_modules() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set[str]()}
    assert sorted(map(len, house._components(edges))) == [1, 3]
