"""A door offers each name that its package lists, and opens a room only when a name of it is used."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

DOORS = ("engine.adapters", "engine.data", "engine.evals", "engine.scheduler", "engine.training")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("door", DOORS)
def test_every_name_of_a_door_is_there(door: str) -> None:
    module = importlib.import_module(door)
    offered = [name for name in dir(module) if not name.startswith("_")]
    assert len(offered) > 10
    assert [name for name in offered if getattr(module, name, None) is None] == []


@pytest.mark.parametrize("door", sorted({*DOORS} - {"engine.scheduler"}))
def test_a_door_is_opened_without_its_rooms(door: str) -> None:
    code = f"import sys, {door}; print([m for m in sys.modules if m.startswith('{door}.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_name_that_is_not_offered_is_refused_as_by_any_module() -> None:
    door = importlib.import_module("engine.evals")
    with pytest.raises(AttributeError, match=r"module 'engine\.evals' has no attribute 'nothing_like_it'"):
        _ = door.nothing_like_it
