"""Credentials do not get into what is logged or told."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.telemetry.redaction import SECRET, without_credentials, without_secrets


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("postgresql+psycopg2://mlflow:hunter2@db:5432/mlflow refused", "postgresql+psycopg2://db:5432/mlflow refused"),
        ("(at http://user:p@ss@host/api, then https://tok@other)", "(at http://host/api, then https://other)"),
        ("connection failed: user=x password=hunter2 host=db", "connection failed: user=x password=*** host=db"),
        ("https://host/?token=abc&x=1", "https://host/?token=***&x=1"),
        ("mail a@b.c about https://host/a@b", "mail a@b.c about https://host/a@b"),
        ("smtp://u:pa/ss@h and http://host:8080/a@b", "smtp://h and http://host:8080/a@b"),
        ("AWS_SECRET_ACCESS_KEY=abcd1234 OPENAI_API_KEY=abc123", "AWS_SECRET_ACCESS_KEY=*** OPENAI_API_KEY=***"),
        ('{"password": "hunt er\\"22", "n": 1}', '{"password": "***", "n": 1}'),
        (r'"{\"secret\": \"hunter\", \"n\": 5}"', r'"{\"secret\": \"***\", \"n\": 5}"'),
        ("token: abcdefgh, password = abcd", "token: *** password = ***"),
        ("HF_TOKEN=abc; DB_PASSWORD='a b' PGPASSWORD=x", "HF_TOKEN=***; DB_PASSWORD='***' PGPASSWORD=***"),
    ],
)
def test_users_and_passwords_are_cut_out(text: str, left: str) -> None:
    assert without_credentials(text) == left


@pytest.mark.parametrize("key", ["github_pat_11ABCDEFG0_abcdefgh", "ghp_abcdefgh1234", "gsk_abcdefgh12345678", "ASIA0123456789ABCDEF"])
def test_what_has_the_form_of_a_key_is_cut_out(key: str) -> None:
    assert key[-8:] not in without_secrets(f"using {key} now")


def test_a_key_of_a_tracker_is_cut_out_but_no_commit() -> None:
    digest = "0123456789abcdef0123456789abcdef01234567"
    assert without_secrets(f"wandb login {digest} at commit {digest}") == f"wandb login *** at commit {digest}"


@pytest.mark.parametrize(
    "line",
    [
        "num_tokens: 20480 max_token: 5 tokens_per_s=10240 token: 7, token=None", "token accuracy 0.8 mean_token_accuracy=0.9",
        "pad_token: <|pad|> eos_token='</s>' tokenizer: demo", "std::token::x keys: 3 key=value secretary: bob password reset",
    ],
)  # fmt: skip
def test_ordinary_lines_stay(line: str) -> None:
    assert without_secrets(line) == line


@pytest.mark.parametrize("piece", ["://a:", "password=", "password='\\", "token: 1", '\\"', "secret_"])
def test_a_long_line_takes_a_time_in_proportion(piece: str) -> None:
    line = piece * 100_000
    assert 0 < len(without_secrets(line)) <= len(line)  # with a pattern that is quadratic: after hours


ATOMS = [
    "password", "pa\u017f\u017fword", "passphrase", "SECRET_KEY", "pwd", "api-\u212aey", "private_key", "token", "HF_TOKEN", "num_tokens",
    "=", ": ", "=>", '"', "'", "\\", "\n", "\r", " ", "x", "hunter2", "12", "none",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(ATOMS), max_size=20).map("".join))
def test_lines_that_name_no_secret_need_no_search(text: str) -> None:
    assert without_credentials(text) == SECRET.sub(r"\1***", text)
