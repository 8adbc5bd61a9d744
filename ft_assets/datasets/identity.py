"""Who an example and a dataset are: hashes of content, never of files or names.

Two examples are duplicates when their normalised text is equal: Unicode in NFC, runs of white space as one space. Case and
compatibility characters are kept: they can be the very thing that a row teaches.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ft_assets.datasets.schema import Example, Message, canonical

FORM_VERSION = 1
"""Of the internal form; a change makes new dataset ids."""
_SPACES = bytes.maketrans(b"\t\n\v\f\r\x1c\x1d\x1e\x1f", b" " * 9)
_WIDE_SPACES = "\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
"""Every code point that ``str.split`` splits at, in two parts: ASCII, and the others."""


def normalise(text: str) -> str:
    """`text` in NFC, white space collapsed to single spaces and stripped: ``" ".join(text.split())`` for ASCII."""
    return _normal_bytes(text).decode("utf-8", "surrogatepass")


def _normal_bytes(text: str) -> bytes:
    """``normalise(text)`` in UTF-8: bytes are translated and searched faster than a text of many words is split and joined."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
        if text.count(" ") * 16 < len(text):  # scripts without spaces: few words to join
            return " ".join(text.split()).encode("utf-8", "surrogatepass")
        for space in _WIDE_SPACES:
            if space in text:
                text = text.replace(space, " ")
    data = text.encode("utf-8", "surrogatepass").translate(_SPACES)
    while b"  " in data:
        data = data.replace(b"  ", b" ")
    return data.strip(b" ")


def content_hash(example: Example) -> str:
    """sha256 of the normalised text: equal for duplicates, so also the key that the split goes by."""
    return _content_digest(example).hex()


def content_hashes(examples: Sequence[Example]) -> list[bytes]:
    """The 32 bytes of :func:`content_hash` for each of `examples`."""
    return [_content_digest(example) for example in examples]


def _content_digest(example: Example) -> bytes:
    parts = [example.kind.encode(), b"" if example.label is None else str(example.label).encode()]
    for group in (example.messages, example.chosen, example.rejected):
        parts.append(b"\0\0")
        for message in group:
            parts += (message.role.encode(), b"\0", _normal_bytes(message.content or ""), b"\0")
            if message.tool_calls:
                parts += _call_parts(message)
    parts += (b"\0\0", _normal_bytes(example.text or ""))
    if example.tools:
        parts += (b"\0\0", json.dumps(example.tools, sort_keys=True).encode())
    return hashlib.sha256(b"".join(parts)).digest()


def _call_parts(message: Message) -> Iterable[bytes]:
    for call in message.tool_calls:
        yield from (call.name.encode("utf-8", "surrogatepass"), b"\0", json.dumps(call.arguments, sort_keys=True).encode(), b"\0")


class ContentDigest:
    """Running sha256 over the rows of a dataset in order."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, example: Example) -> bytes:
        """Take `example` in; returns its canonical bytes, which the caller stores."""
        data = canonical(example)
        self._digest.update(len(data).to_bytes(8, "big") + data)
        return data

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def dataset_id(content_sha256: str, settings: Mapping[str, Any]) -> str:
    """``ds_`` + 24 hex digits over the content and the settings that shaped it."""
    spelled = json.dumps({"form": FORM_VERSION, "content": content_sha256, "settings": settings}, sort_keys=True)
    return "ds_" + hashlib.sha256(spelled.encode()).hexdigest()[:24]
