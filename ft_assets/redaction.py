"""What must not be repeated: credentials in the text of an error, before it is logged or told."""

from __future__ import annotations

import re

USERINFO = re.compile(r"(?<=://)[^\s/@]*(?:@[^\s/@]*)*@")
SECRET = re.compile(r"(?i)\b(password|passwd|pwd|token|secret|api_key)=[^\s&;'\"]+")


def without_credentials(text: str) -> str:
    """`text` without the user and password of its URIs, and without the values of what is called a password or token."""
    return SECRET.sub(r"\1=***", USERINFO.sub("", text))
