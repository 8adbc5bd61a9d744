"""Removes text that must not be repeated: credentials in errors and log lines, and tenant data quoted by errors."""

from __future__ import annotations

import re

USERINFO = re.compile(r"(?<=://)[^\s/@]*(?:@[^\s/@]*)*@")
SLASHED_USERINFO = re.compile(r"(?<=://)[^\s/@:\[]{0,200}:(?!\d{1,5}[/?#])[^\s@'\"]{1,200}@")
"""Handles passwords with a slash; text after a port is a path and may contain an ``@``."""
SECRET = re.compile(
    r"""(?ix)
    ( (?: passw(?:or)?d | passphrase | secret(?:[_-]?(?:access[_-]?)?key)? | (?<![a-z0-9])pwd
        | (?:api|access|account|private|signing|encryption|license)[_-]?key
        | (?: (?<![a-z0-9_-])(?:(?:access|auth|api|bearer|refresh|session|security|id|user|hf|hub|gh|github|gitlab|slack)[_-]?)?token
            | (?-i:(?<=[A-Z0-9]_)TOKEN) )
          (?! \\?["']? [ \t]{0,3} [=:] [ \t]{0,3} \\?["']?
              (?: [-+0-9.,]+(?:e[-+]?[0-9]{1,3})? | none | null | true | false ) (?![^\s,;&)}\]'"\\]) )
      )
      \\?["']? [ \t]{0,3} (?: => | [=:](?![=:]) ) [ \t]{0,3} (?:\\?["'])?
    )
    (?: (?<=\\["'])(?:[^"'\\\n]|\\(?!["']))+ | (?<!\\)(?<=")(?:[^"\\\n]|\\.)+ | (?<!\\)(?<=')(?:[^'\\\n]|\\.)+ | (?<!["'])[^\s&;'"]+ )
    """
)
"""``NAME=value``, ``name: value``, ``"name": "value"`` for names such as password, secret, key or token; token counts are kept."""
WORDS = ("passw", "passphrase", "secret", "pwd", "key", "token")
"""Every match of ``SECRET`` contains one of these, and no match spans lines, so lines without them need no search."""
KEY = re.compile(
    r"\b(ft-(?:sk|op)-|whsec_|hf_|sk-|A(?:KI|SI)A|github_pat_|gh[oprsu]_|glpat-|gsk_|xox[abeprs]-|AIza|wandb_v1_)[A-Za-z0-9_\-+/]{8,}=*"
)
"""Keys of the platform, webhook secrets, and keys of common services."""
WANDB = re.compile(r"(?i)(\bwandb[: ]{1,3}login[ \t]{1,3}|\blocal-)[0-9a-f]{40}\b")
BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/\-]{8,}=*")
QUOTED = (
    re.compile(r"\[parameters: .*?\](?=\n\(Background|\Z)", re.DOTALL),  # SQLAlchemy: the values of a statement
    re.compile(r"(?m)^DETAIL:.*$"),  # PostgreSQL: the row
    re.compile(r"input_value=.*?(?=, input_type=)", re.DOTALL),  # pydantic: the field
)
"""Patterns of library errors that quote their input."""


def without_credentials(text: str) -> str:
    """Returns `text` without user and password in URIs, and without values of passwords and tokens."""
    lines = SLASHED_USERINFO.sub("", USERINFO.sub("", text)).split("\n")
    return "\n".join(SECRET.sub(r"\1***", line) if _may_hold_secret(line) else line for line in lines)


def _may_hold_secret(line: str) -> bool:
    folded = line.casefold()
    return any(word in folded for word in WORDS)


def without_secrets(text: str) -> str:
    """Returns `text` without credentials and without anything in the form of a key: a log's last line of defense."""
    return BEARER.sub(r"\1 ***", WANDB.sub(r"\1***", KEY.sub(r"\1***", without_credentials(text))))


def without_data(text: str) -> str:
    """Returns an exception's text without secrets, and without quoted tenant data."""
    for pattern in QUOTED:
        text = pattern.sub("***", text)
    return without_secrets(text)
