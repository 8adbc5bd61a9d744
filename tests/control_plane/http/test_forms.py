"""A message calls something "not of the form" only where the form is what is wrong."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from control_plane.billing.invoices.rules import month_named
from control_plane.models.model_fetch import fetch_model
from control_plane.platform.secrets import hint_of
from core.errors import InvalidRequest

NOW = datetime(2026, 11, 22, tzinfo=UTC)


@pytest.mark.parametrize(
    ("secret", "hint"),
    [
        ("ft-sk-0123456789abcdefwxyz", "ft-sk-...wxyz"),
        ("ft-op-0123456789abcdefwxyz", "ft-op-...wxyz"),
        ("ft-sk-wrong", "ft-sk-... (too short)"),
        ("sk-0123456789abcdefwxyz", "(not of the form ft-sk-...)"),
    ],
)
def test_a_key_of_the_right_form_is_not_called_another(secret: str, hint: str) -> None:
    assert hint_of(secret) == hint


@pytest.mark.parametrize(
    ("month", "says"),
    [("11/2026", "is not of the form yyyy-mm"), ("2026-13", "has no month from 01 to 12"), ("1999-12", "of this century")],
)
def test_a_month_that_does_not_exist_is_not_called_a_wrong_form(month: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        month_named(month, now=NOW)
    assert ("not of the form" in refused.value.message) == (month == "11/2026")


@pytest.mark.parametrize(("repo", "says"), [("no-slash", "of the form ORG/NAME"), ("org/na--me", "it contains '..' or '--'")])
def test_a_repository_of_the_right_form_is_refused_for_what_it_is(repo: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(says)):
        fetch_model(repo, "0" * 40, tmp_path, endpoint="http://127.0.0.1:9")
