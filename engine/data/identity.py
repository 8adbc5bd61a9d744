"""Identity of examples and datasets: hashes of content, never of files or names.

Two examples are duplicates if their normalized text is equal: Unicode in NFC, runs of white space as one space. Case and compatibility
characters are kept: they can be what a row teaches.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.data.schema import Example

FORM_VERSION = 2
"""Version of the internal form; a change makes new dataset ids."""
WIDE_SPACES = "\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
"""Code points beyond ASCII at which ``str.split`` splits."""


def content_hash(example: Example) -> str:
    """Returns the sha256 of the normalized text: equal for duplicates, so also the key of the split."""
    return content_hashes([example])[0].hex()


def content_hashes(examples: Sequence[Example]) -> list[bytes]:
    """Returns the 32 bytes of :func:`content_hash` for each of `examples`; cheapest with thousands at a time.

    An example is serialized as ``kind label 0 0 (role 0 content 0 ("reasoning" 0 reasoning 0)? (name 0 arguments 0)*)*`` for each of its
    three groups of messages, then its text, its tools, its template's variables and its response format; white space is collapsed
    throughout, so it never distinguishes two rows.
    """
    from engine.data.dedup import kernels

    if not examples:
        return []
    spelled = [_spelled(example) for example in examples]
    offsets = np.concatenate(([0], np.cumsum([len(s) for s in spelled]))).astype(np.int64)
    out = np.empty(offsets[-1], np.uint8)
    ends = np.zeros(len(offsets), np.int64)
    kernels.collapse_bytes(np.frombuffer(b"".join(spelled), np.uint8), offsets, out, ends)
    data, places = out.data, ends.tolist()
    return [hashlib.sha256(data[start:end]).digest() for start, end in itertools.pairwise(places)]


def _spelled(example: Example) -> bytes:
    """Returns the text to hash, before its white space is collapsed; no part contains NUL, which separates them."""
    parts = [f"{example.kind}{'' if example.label is None else example.label}"]
    for group in (example.messages, example.chosen, example.rejected):
        parts.append("\0")
        for message in group:
            parts.append(f"\0{message.role}\0{message.content or ''}")
            if message.reasoning:
                parts.append(f"\0reasoning\0{message.reasoning}")
            if message.tool_calls:
                parts += (f"\0{call.name}\0{json.dumps(call.arguments, sort_keys=True)}" for call in message.tool_calls)
    if example.text is not None:
        parts.append(f"\0\0{example.text}")
    if example.tools:
        parts.append(f"\0\0\0{json.dumps(example.tools, sort_keys=True)}")
    if example.template_kwargs:
        parts.append(f"\0\0\0\0{json.dumps(example.template_kwargs, sort_keys=True)}")
    if example.response_format:
        parts.append(f"\0\0\0\0\0{json.dumps(example.response_format, sort_keys=True)}")
    text = "".join(parts)
    if not text.isascii():
        text = text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)
        for space in WIDE_SPACES:
            if space in text:
                text = text.replace(space, " ")
    return text.encode("utf-8", "surrogatepass")


def dataset_id(content_sha256: str, settings: Mapping[str, Any]) -> str:
    """Returns ``ds_`` + 24 hex digits over the content and the settings that shaped it."""
    spelled = json.dumps({"form": FORM_VERSION, "content": content_sha256, "settings": settings}, sort_keys=True)
    return "ds_" + hashlib.sha256(spelled.encode()).hexdigest()[:24]
