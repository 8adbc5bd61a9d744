"""What must not be repeated: credentials in the text of an error or of a log line, and what an error quotes of somebody's data."""

from __future__ import annotations

import re

USERINFO = re.compile(r"(?<=://)[^\s/@]*(?:@[^\s/@]*)*@")
SECRET = re.compile(r"(?i)\b(password|passwd|pwd|token|secret|api_key)=[^\s&;'\"]+")
KEY = re.compile(r"\b(ft-(?:sk|op)-|whsec_|hf_|sk-|AKIA)[A-Za-z0-9_\-+/]{8,}=*")
"""Keys of the platform, secrets of webhooks, and what other services' keys look like."""
BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/\-]{8,}=*")
QUOTED = (
    re.compile(r"\[parameters: .*?\](?=\n\(Background|\Z)", re.DOTALL),  # SQLAlchemy: the values of a statement
    re.compile(r"(?m)^DETAIL:.*$"),  # PostgreSQL: the row
    re.compile(r"input_value=.*?(?=, input_type=)", re.DOTALL),  # pydantic: the field
)
"""Where the libraries' errors repeat the data that they were given."""


def without_credentials(text: str) -> str:
    """`text` without the user and password of its URIs, and without the values of what is called a password or token."""
    return SECRET.sub(r"\1=***", USERINFO.sub("", text))


def without_secrets(text: str) -> str:
    """`text` without credentials, and without anything that has the form of a key: the last line of defence of a log."""
    return BEARER.sub(r"\1 ***", KEY.sub(r"\1***", without_credentials(text)))


def without_data(text: str) -> str:
    """The text of an exception without secrets, and without the values that it quotes of somebody's data."""
    for pattern in QUOTED:
        text = pattern.sub("***", text)
    return without_secrets(text)
