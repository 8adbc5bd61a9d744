"""The check of an installation: what answers, what does not, and why."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.platform.context import Platform
from control_plane.platform.settings import load
from deploy.cluster import installation_check


def test_each_part_is_checked_by_itself(platform: Platform, serve: Callable[[ASGIApp], str]) -> None:
    settings = load({"FT_HOME": str(platform.settings.home), "FT_INTERNAL_URL": serve(create_app(platform)), "FT_DAGSTER_TOKEN": "t"})
    found = {name: probe(0.0) for name, probe in installation_check.probes(settings, "http://127.0.0.1:9").items()}
    assert {name: answer.ready for name, answer in found.items()} == {
        "API, database and object store": True, "Dagster's code location": False, "Dagster's daemons": False,
    }  # fmt: skip
    assert found["Dagster's daemons"].detail == "webserver starting"
