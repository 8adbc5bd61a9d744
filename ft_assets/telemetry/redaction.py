"""What must not be repeated: credentials in the text of an error or of a log line, and what an error quotes of somebody's data."""

from __future__ import annotations

import re

USERINFO = re.compile(r"(?<=://)[^\s/@]*(?:@[^\s/@]*)*@")
SLASHED_USERINFO = re.compile(r"(?<=://)[^\s/@:\[]{0,200}:(?!\d{1,5}[/?#])[^\s@'\"]{1,200}@")
"""With a slash in the password; what follows a port is a path, and may hold an ``@``."""
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
"""``NAME=value``, ``name: value``, ``"name": "value"`` of what is called a password, secret, key or token; numbers of tokens stay."""
WORDS = ("passw", "passphrase", "secret", "pwd", "key", "token")
"""One of them stands in each match of ``SECRET``. No match goes beyond its line, so lines without them need no search."""
KEY = re.compile(
    r"\b(ft-(?:sk|op)-|whsec_|hf_|sk-|A(?:KI|SI)A|github_pat_|gh[oprsu]_|glpat-|gsk_|xox[abeprs]-|AIza|wandb_v1_)[A-Za-z0-9_\-+/]{8,}=*"
)
"""Keys of the platform, secrets of webhooks, and what other services' keys look like."""
WANDB = re.compile(r"(?i)(\bwandb[: ]{1,3}login[ \t]{1,3}|\blocal-)[0-9a-f]{40}\b")
BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/\-]{8,}=*")
QUOTED = (
    re.compile(r"\[parameters: .*?\](?=\n\(Background|\Z)", re.DOTALL),  # SQLAlchemy: the values of a statement
    re.compile(r"(?m)^DETAIL:.*$"),  # PostgreSQL: the row
    re.compile(r"input_value=.*?(?=, input_type=)", re.DOTALL),  # pydantic: the field
)
"""Where the libraries' errors repeat the data that they were given."""


def without_credentials(text: str) -> str:
    """`text` without the user and password of its URIs, and without the values of what is called a password or token."""
    lines = SLASHED_USERINFO.sub("", USERINFO.sub("", text)).split("\n")
    return "\n".join(SECRET.sub(r"\1***", line) if _may_hold_secret(line) else line for line in lines)


def _may_hold_secret(line: str) -> bool:
    folded = line.casefold()
    return any(word in folded for word in WORDS)


def without_secrets(text: str) -> str:
    """`text` without credentials, and without anything that has the form of a key: the last line of defence of a log."""
    return BEARER.sub(r"\1 ***", WANDB.sub(r"\1***", KEY.sub(r"\1***", without_credentials(text))))


def without_data(text: str) -> str:
    """The text of an exception without secrets, and without the values that it quotes of somebody's data."""
    for pattern in QUOTED:
        text = pattern.sub("***", text)
    return without_secrets(text)
