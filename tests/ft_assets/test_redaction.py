"""Credentials do not get into what is logged or told."""

from __future__ import annotations

import pytest

from ft_assets.redaction import without_credentials


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("postgresql+psycopg2://mlflow:hunter2@db:5432/mlflow refused", "postgresql+psycopg2://db:5432/mlflow refused"),
        ("(at http://user:p@ss@host/api, then https://tok@other)", "(at http://host/api, then https://other)"),
        ("connection failed: user=x password=hunter2 host=db", "connection failed: user=x password=*** host=db"),
        ("https://host/?token=abc&x=1", "https://host/?token=***&x=1"),
        ("mail a@b.c about https://host/a@b", "mail a@b.c about https://host/a@b"),
    ],
)
def test_users_and_passwords_are_cut_out(text: str, left: str) -> None:
    assert without_credentials(text) == left
