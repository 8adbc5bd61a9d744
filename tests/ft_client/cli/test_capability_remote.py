"""``ft suites capability`` against the real API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Ft = Callable[..., Any]


def test_capability_suites_are_listed_with_what_keeps_some_from_being_asked(ft: Ft) -> None:
    listed = ft("suites", "capability")
    assert listed.code == 0
    lines = {line.split()[0]: " ".join(line.split()) for line in listed.out.splitlines() if line.strip()}
    assert lines["standin_choices"].startswith("standin_choices 1.0 0 200 yes")
    assert lines["mmlu"].startswith("mmlu 1.0 5 ? no:")
    found = {suite["name"]: suite for suite in ft("suites", "capability", "--json").json}
    assert [name for name, suite in found.items() if suite["ready"]] == ["standin_choices", "standin_copy"]
