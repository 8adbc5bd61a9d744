"""A platform whose object store and clock the tests control."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from control_plane.platform.context import Platform
from tests.support.platform.deletable_tenants import Clock, Weak, World


@pytest.fixture
def world(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> World:
    clock, store = Clock(now=datetime(2026, 5, 1, tzinfo=UTC)), Weak(fresh_platform.settings.home / "objects")
    return World(platform=replace(fresh_platform, clock=clock, objects=store), clock=clock, store=store, write=write_chat_rows)
