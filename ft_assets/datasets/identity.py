"""Who an example and a dataset are: hashes of content, never of files or names.

Two examples are duplicates when their normalised text is equal: Unicode in NFC, runs of white space as one space. Case and
compatibility characters are kept: they can be the very thing that a row teaches.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from ft_assets.datasets.schema import Example, Message, canonical

FORM_VERSION = 1
"""Of the internal form; a change makes new dataset ids."""


def normalise(text: str) -> str:
    return " ".join((text if text.isascii() else unicodedata.normalize("NFC", text)).split())


def content_hash(example: Example) -> str:
    """sha256 of the normalised text: equal for duplicates, so also the key that the split goes by."""
    digest = hashlib.sha256(example.kind.encode())
    for group in (example.messages, example.chosen, example.rejected):
        digest.update(b"\0\0")
        for message in group:
            digest.update("\0".join(_parts(message)).encode("utf-8", "surrogatepass") + b"\0")
    digest.update(b"\0\0" + normalise(example.text or "").encode("utf-8", "surrogatepass"))
    if example.tools:
        digest.update(b"\0\0" + json.dumps(example.tools, sort_keys=True).encode())
    return digest.hexdigest()


def _parts(message: Message) -> Iterable[str]:
    yield message.role
    yield normalise(message.content or "")
    for call in message.tool_calls:
        yield call.name
        yield json.dumps(call.arguments, sort_keys=True)


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
