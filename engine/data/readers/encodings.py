"""Text that is not UTF-8: read in the encoding that the tenant names, or detected."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

from core.errors import InvalidDataset
from engine.data.problems import Problem

Encoding = Literal["utf-8", "windows-1252", "iso-8859-15", "windows-1250", "windows-1251", "mac-roman", "utf-16"]
ENCODINGS: tuple[str, ...] = get_args(Encoding)
UTF8 = "utf-8"
ENCODING_LABELS: Mapping[str, str] = {
    "utf-8": "UTF-8", "windows-1252": "Windows-1252", "iso-8859-15": "ISO 8859-15", "windows-1250": "Windows-1250",
    "windows-1251": "Windows-1251", "mac-roman": "Mac OS Roman", "utf-16": "UTF-16",
}  # fmt: skip
TYPOGRAPHIC = frozenset(b"\x80\x82\x84\x85\x8b\x91\x92\x93\x94\x95\x96\x97\x99\x9b")
"""Euro sign, quotes, dashes, ellipsis and bullet of Windows-1252. Other bytes below 0xA0 are rare letters there, and the accented
letters of Western Europe in Mac OS Roman."""
MIN_CYRILLIC = 4
"""Adjacent letters beyond ASCII from which a text is taken for Cyrillic: Western words have one or two."""
BY_CODEC: Mapping[str, str] = {**{codecs.lookup(e).name: e for e in ENCODINGS}, "iso8859-1": "windows-1252", "ascii": UTF8}
MIN_UTF8_SHARE = 0.05
"""Share of runs of bytes beyond ASCII above which those that are UTF-8 are not accidental: two letters of Windows-1252 seldom look like
it."""
MIXED_FIX = "save the whole file as UTF-8: parts of it are, parts are not"
SHOWN_BYTES = 20
"""Characters of a word on either side of its first byte that is not UTF-8."""
WORD, WORD_END = re.compile(rb"[\w\x80-\xff]+"), re.compile(rb"[\w\x80-\xff]*\Z")
HIGH = re.compile(rb"[\x80-\xff]+")


def encoding_named(name: Any) -> Any:
    """Returns the canonical encoding of an alias (``latin1``, ``cp1252``, ``utf8``); `name` itself if it is not supported.

    Latin-1 is read as Windows-1252, a superset, like on the web.
    """
    try:
        return BY_CODEC.get(codecs.lookup(name).name, name)
    except (LookupError, TypeError, ValueError):
        return name


def as_utf8(chunks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """Yields `chunks` of text in `encoding` as UTF-8; ``InvalidDataset`` at the first byte that the encoding does not have."""
    decoder = codecs.getincrementaldecoder(encoding)()
    position = 0
    for data in chunks:
        yield _decoded(decoder, data, position, encoding)
        position += len(data)
    yield _decoded(decoder, b"", position, encoding, final=True)


def _decoded(decoder: codecs.IncrementalDecoder, data: bytes, position: int, encoding: str, *, final: bool = False) -> bytes:
    try:
        return decoder.decode(data, final).encode("utf-8")
    except UnicodeError as error:
        at = position + (error.start if isinstance(error, UnicodeDecodeError) else 0)
        others = ", ".join(e for e in ENCODINGS if e != encoding)
        raise InvalidDataset(
            f"the bytes at {at} are not {ENCODING_LABELS[encoding]}; name another encoding ({others}), or save the file as UTF-8",
            code="wrong_encoding",
        ) from error


def likely_encoding(raw: bytes) -> Encoding | None:
    """Returns the most likely encoding of `raw`, which is not UTF-8; None if parts of it are UTF-8."""
    runs = HIGH.findall(raw)
    if any(_is_utf8(run) for run in runs):
        return None
    high = b"".join(runs)
    letters = sum(byte >= 0xC0 for byte in high)
    low_letters = sum(byte < 0xA0 and byte not in TYPOGRAPHIC for byte in high)
    if low_letters > letters:
        return "mac-roman"
    side_by_side = sum(len(run) for run in runs if len(run) > 1)
    return "windows-1251" if side_by_side >= MIN_CYRILLIC and 2 * side_by_side > len(high) else "windows-1252"


def is_partly_utf8(head: bytes) -> bool:
    """Returns whether `head` mixes UTF-8 with other text, like joined files of two programs: no encoding reads both."""
    runs = HIGH.findall(head.rstrip(bytes(range(0x80, 0x100))))  # the last one may be cut off
    num_utf8 = sum(map(_is_utf8, runs))
    return MIN_UTF8_SHARE * len(runs) < num_utf8 < len(runs)


def not_utf8(raw: bytes, *, path: str = "", place: str = "") -> Problem:
    """Returns the problem of a text whose bytes `raw` are not UTF-8, with the encoding that would read it."""
    at = next(m.start() for m in HIGH.finditer(raw) if not _is_utf8(m.group()))
    message = f"byte 0x{raw[at]:02x}{place.format(at=at)} is not UTF-8"
    likely = likely_encoding(raw)
    if likely is None:
        return Problem("invalid_utf8", message, path=path, fix=MIXED_FIX)
    before, after = WORD_END.search(raw[max(0, at - SHOWN_BYTES) : at]), WORD.match(raw[at : at + SHOWN_BYTES])
    read = b"".join(found.group() for found in (before, after) if found).decode(likely, "replace")
    options = f"--encoding {likely}"
    return Problem(
        "invalid_utf8",
        f"{message}; as {ENCODING_LABELS[likely]} it reads {read!r}",
        path=path,
        fix=f"read the file as {ENCODING_LABELS[likely]}, or save it as UTF-8",
        options=options,
    )


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
