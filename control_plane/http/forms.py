"""Multipart forms: fields are kept, the file's bytes go straight to the store.

Nothing is read before the route asks for it, so that an unauthorized caller is refused first. The file is never buffered: a thread stores
it by pulling, and the network is read at that pace. A field may hold an object, as JSON or spread over fields as OpenAI's client sends them
(``policies[pii]=redact``).
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.message import Message
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

import anyio
from anyio.lowlevel import RunVar
from fastapi import Request
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect

from control_plane.http.rate_limits import TenantLimiter
from core.errors import InvalidRequest, did_you_mean
from core.storable_text import check_storable
from engine.data import READING_POLICIES

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_FIELD_BYTES = 1 << 20
"""Size limit of all fields together, names included."""
MAX_PARTS = 1000
MAX_STORING = 32
"""Bodies stored at once, each in its own thread rather than one of the 40 that handle requests; others wait unread."""
MAX_STORING_EACH = 8
"""Of these, per tenant."""
TURN_S = 30.0
"""Seconds that a body waits for a thread."""
LOOP_LOOK_S = 5.0

_T = TypeVar("_T")
_storing: RunVar[TenantLimiter] = RunVar("_storing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Slowest sender accepted, since it holds a thread and a half-written object. Time spent by the store does not count."""

    idle_s: float = 60.0
    """Seconds without a byte after which the sender counts as gone."""
    allowance_s: float = 60.0
    """Total seconds of waiting before the rate is checked."""
    bytes_per_s: int = 64 << 10


class Form:
    """The body of one request with one file, in the field `file_field`."""

    def __init__(self, request: Request, *, file_field: str, known: Collection[str] = (), pace: Pace | None = None) -> None:
        """Takes the fields that are `known` besides the file; ``name[]`` stands for an object, as JSON or spread over fields."""
        self._file_field = file_field
        self._known = [file_field, *known]
        self._pace = pace or Pace()
        self._num_bytes, self._waited_s = 0, 0.0
        self._chunks = _chunks_of(request)
        boundary = _boundary(request.headers.get("content-type"))
        self._parser = None if boundary is None else _parser(self, boundary)
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._headers: dict[bytes, bytes] = {}
        self._header_name, self._header_value = b"", b""
        self._name, self._value = "", bytearray()
        self._in_file, self._file_begun, self._file_ended = False, False, False
        self._file = bytearray()
        self._is_whole = False
        self._num_parts, self._field_bytes = 0, 0

    async def to_file(self) -> None:
        """Read the fields before the file; refuses a body without a file."""
        while not self._file_begun and await self._pump():
            pass
        if not self._file_begun:
            raise missing(self._file_field)

    async def store(self, store: Callable[[BinaryIO], _T], *, tenant: str) -> _T:
        """Run `store` on the file's bytes in a thread when it is `tenant`'s turn; it reads them to the end or raises."""
        reader = cast(BinaryIO, _Reader(self, asyncio.get_running_loop()))
        return await _store_limiter().run(tenant, lambda: store(reader))

    async def rest(self) -> None:
        """Read the fields after the file, to the end of the body."""
        while await self._pump():
            pass

    async def read(self, size: int) -> bytes:
        """Return `size` bytes of the file, fewer only at its end."""
        while len(self._file) < size and not self._file_ended:
            if not await self._pump():
                break
        data = bytes(memoryview(self._file)[:size])
        del self._file[:size]
        return data

    async def _pump(self) -> bool:
        """Parse what has arrived; returns False at the end of the body."""
        if self._parser is None:
            return False
        pace, began = self._pace, time.monotonic()
        left_s = pace.allowance_s + self._num_bytes / pace.bytes_per_s - self._waited_s
        try:
            with anyio.fail_after(min(pace.idle_s, max(0.0, left_s))):
                chunk = await anext(self._chunks, None)
            self._waited_s += time.monotonic() - began
            self._num_bytes += len(chunk or b"")
            if chunk is None:
                self._parser.finalize()
            else:
                self._parser.write(chunk)
        except TimeoutError:
            self._waited_s += time.monotonic() - began
            raise self._too_slow(is_idle=left_s >= pace.idle_s) from None
        except ClientDisconnect:
            raise InvalidRequest("the connection ended in the middle of the body; send it again", code="upload_interrupted") from None
        except FormParserError as error:
            raise InvalidRequest(f"the body is not multipart/form-data: {error}", code="invalid_multipart") from error
        if chunk is None and not self._is_whole:
            raise InvalidRequest("the body ends before its last boundary; send all of it", code="invalid_multipart")
        return chunk is not None

    def _too_slow(self, *, is_idle: bool) -> InvalidRequest:
        pace = self._pace
        if is_idle:
            message = f"nothing was received for {pace.idle_s:g} s in the middle of the body; send it again"
            return InvalidRequest(message, code="upload_interrupted")
        return InvalidRequest(
            f"{self._num_bytes:,} bytes of the body came in {self._waited_s:.0f} s of waiting for them, and after the first "
            f"{pace.allowance_s:g} s it has to be {pace.bytes_per_s:,} a second; send it over a faster line, or in smaller parts",
            code="upload_too_slow",
        )

    # Callbacks of the parser.

    def on_part_begin(self) -> None:
        self._headers, self._name, self._value = {}, "", bytearray()
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"the form has more than {MAX_PARTS} parts; leave out what is not documented", code="invalid_multipart")

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def on_header_end(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name, self._header_value = b"", b""

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        if b"name" not in options:
            raise InvalidRequest("a part of the form has no name; give each one in its Content-Disposition", code="invalid_multipart")
        self._name = _decoded(options[b"name"])
        check_field(self._name, self._known, given=self.fields)
        self._in_file = self._name == self._file_field
        if not self._in_file:
            return
        if self._file_begun:
            raise InvalidRequest(f"{self._file_field} was sent twice; send one", code="invalid_multipart", param=self._file_field)
        self._file_begun = True
        self.filename = _decoded(options[b"filename"]) if options.get(b"filename") else _extended_filename(self._headers)

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._file += memoryview(data)[start:end]
            return
        self._field_bytes += end - start + len(self._name)
        if self._field_bytes > MAX_FIELD_BYTES:
            raise InvalidRequest(
                f"the fields beside {self._file_field} are larger than {MAX_FIELD_BYTES >> 20} MiB; a file goes into {self._file_field}",
                code="invalid_multipart",
            )
        self._value += data[start:end]

    def on_part_end(self) -> None:
        if self._in_file:
            self._in_file, self._file_ended = False, True
        else:
            self.fields[self._name] = _decoded(bytes(self._value))

    def on_end(self) -> None:
        self._is_whole = True


class _Reader(io.RawIOBase):
    """The file of a form, for a thread: the event loop that owns the connection carries out each read."""

    def __init__(self, form: Form, loop: asyncio.AbstractEventLoop) -> None:
        self._form, self._loop = form, loop

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            return b"".join(iter(lambda: self.read(1 << 20), b""))
        requested = asyncio.run_coroutine_threadsafe(self._form.read(size), self._loop)
        while True:
            try:
                return requested.result(LOOP_LOOK_S)
            except TimeoutError:
                if not self._loop.is_running():
                    raise ConnectionAbortedError("the server is shutting down") from None

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


def check_field(name: str, known: Collection[str], *, given: Collection[str]) -> None:
    """Refuse a field that is not `known`, or that is among those `given` before; ``name[]`` is known as ``name`` and ``name[key]``."""
    spread_over = SPREAD.fullmatch(name)
    if name not in known and f"{spread_over[1] if spread_over else name}[]" not in known:
        names = [field.removesuffix("[]") for field in known]
        raise InvalidRequest(
            f"the form has the unknown field {name[:80]!r}; known are {', '.join(names)}{did_you_mean(name.partition('[')[0], names)}",
            code="unknown_parameter",
            param=name[:80],
        )
    whole = spread_over[1] if spread_over else name
    if name in given or (spread_over and whole in given) or any(other.startswith(f"{name}[") for other in given):
        raise InvalidRequest(f"{whole} was sent twice; send one", code="invalid_multipart", param=whole)


@asynccontextmanager
async def with_file(
    request: Request, known: Collection[str], *, required: Collection[str]
) -> AsyncIterator[tuple[dict[str, str], UploadFile]]:
    """Read a form of texts and one file, ``file``; it is read when the route asks, so that the key is checked first."""
    async with request.form(max_files=1) as form:
        fields: dict[str, str] = {}
        for given, value in form.multi_items():
            check_field(given, ("file", *known), given=fields)
            if isinstance(value, str):
                fields[given] = value
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise missing("file")
        for name in required:
            if name not in fields:
                raise missing(name)
        yield fields, file


def _extended_filename(headers: Mapping[bytes, bytes]) -> str | None:
    """Return a file name that is sent only in the form of RFC 2231 and 5987: ``filename*=UTF-8''%E6%97%A5.jsonl``."""
    parsed = Message()
    parsed["content-disposition"] = headers.get(b"content-disposition", b"").decode("latin-1")
    try:
        return parsed.get_filename()
    except (LookupError, ValueError):  # an encoding that does not exist
        return None


def missing(name: str) -> InvalidRequest:
    """Return the refusal of a form without a required field."""
    return InvalidRequest(f"{name} is missing; send it as a field of multipart/form-data", code="missing_required_parameter", param=name)


def _parser(form: Form, boundary: bytes) -> MultipartParser:
    try:
        return MultipartParser(
            boundary,
            {
                "on_part_begin": form.on_part_begin,
                "on_part_data": form.on_part_data,
                "on_part_end": form.on_part_end,
                "on_header_field": form.on_header_field,
                "on_header_value": form.on_header_value,
                "on_header_end": form.on_header_end,
                "on_headers_finished": form.on_headers_finished,
                "on_end": form.on_end,
            },
        )
    except FormParserError as error:
        raise InvalidRequest(f"the body is not multipart/form-data: {error}", code="invalid_multipart") from error


def _boundary(content_type: str | None) -> bytes | None:
    """Return the boundary of a multipart body; None for any other body, which has no fields."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        return None
    if not options.get(b"boundary"):
        raise InvalidRequest("the Content-Type names no boundary; let your HTTP client write that header", code="invalid_multipart")
    return options[b"boundary"]


async def _chunks_of(request: Request) -> AsyncIterator[bytes]:
    async for chunk in request.stream():
        if chunk:
            yield chunk


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _store_limiter() -> TenantLimiter:
    try:
        return _storing.get()
    except LookupError:
        _storing.set(made := TenantLimiter(total=MAX_STORING, each=MAX_STORING_EACH, wait_s=TURN_S))
        return made


SPREAD = re.compile(r"([a-z_]+)\[([^\[\]]+)\]")
ANCHOR = "created_at"
EXPIRES_AFTER = ("anchor", "seconds")
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000
"""OpenAI's limits: an hour, 30 days."""


def column_map(text: str | None, fields: Mapping[str, str]) -> Mapping[str, str] | None:
    """Column mapping, theirs to ours; None if not given."""
    found = _object(text, fields, "column_map", hint='write {"their column": "prompt"}')
    if found is not None and not all(isinstance(v, str) for v in found.values()):
        raise InvalidRequest(
            f'column_map {str(found)[:80]!r} is not a JSON object of texts; write {{"their column": "prompt"}}',
            code="invalid_column_map",
            param="column_map",
        )
    return found


def policies(text: str | None, fields: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Return the settings by name as requested, unchecked; None if none is given."""
    found = _object(text, fields, "policies", hint='write {"pii": "redact"}')
    if not text and found is not None:
        found = {name: _number(value) if name not in READING_POLICIES else value for name, value in found.items()}
    reading = {name: fields.get(name) or None for name in READING_POLICIES}
    check_storable(reading)
    return with_reading(found, **reading)


def with_reading(policies: Mapping[str, Any] | None, *, encoding: str | None, rows_at: str | None) -> Mapping[str, Any] | None:
    """Return `policies` together with the reading options, which are stored with them; None if none is given."""
    reading = {name: value for name, value in (("encoding", encoding), ("rows_at", rows_at)) if value is not None}
    return {**(policies or {}), **reading} or None


def expires_after(text: str | None, fields: Mapping[str, str]) -> int | None:
    """Return the seconds of `expires_after`, as JSON or spread over fields; None if not given."""
    return expires_after_s(_object(text, fields, "expires_after", hint='write {"anchor": "created_at", "seconds": 86400}'))


def expires_after_s(given: Mapping[str, Any] | None) -> int | None:
    """Return the seconds of ``{"anchor": "created_at", "seconds": 86400}``; None if not given."""
    if not given:
        return None
    if (unknown := next((key for key in given if key not in EXPIRES_AFTER), None)) is not None:
        meant = did_you_mean(unknown, EXPIRES_AFTER)
        raise InvalidRequest(
            f"expires_after has the unknown key {unknown[:80]!r}; it has {' and '.join(EXPIRES_AFTER)}{meant}",
            code="invalid_expires_after",
            param="expires_after",
        )
    anchor, seconds = given.get("anchor"), given.get("seconds")
    if anchor != ANCHOR:
        raise InvalidRequest(
            f"expires_after.anchor {str(anchor)[:80]!r} is not known; it is {ANCHOR!r}", code="invalid_expires_after", param="expires_after"
        )
    whole = int(seconds) if isinstance(seconds, str) and seconds.isascii() and seconds.isdecimal() else seconds
    if not isinstance(whole, int) or isinstance(whole, bool) or not MIN_EXPIRY_S <= whole <= MAX_EXPIRY_S:
        raise InvalidRequest(
            f"expires_after.seconds {str(seconds)[:80]!r} is outside {MIN_EXPIRY_S}..{MAX_EXPIRY_S}, an hour to 30 days; "
            "choose one inside, or leave expires_after out: the file is then kept until you delete it",
            code="invalid_expires_after",
            param="expires_after",
        )
    return whole


def spread(fields: Mapping[str, str], name: str) -> dict[str, str]:
    """Collect the object `name` that is spread over fields: ``name[key]``."""
    found = {m[2]: value for key, value in fields.items() if (m := SPREAD.fullmatch(key)) and m[1] == name}
    check_storable(found, name)
    return found


def _object(text: str | None, fields: Mapping[str, str], name: str, *, hint: str) -> Mapping[str, Any] | None:
    if not text:
        return dict(spread(fields, name)) or None
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        code = {"column_map": "invalid_column_map", "policies": "invalid_policy", "expires_after": "invalid_expires_after"}[name]
        raise InvalidRequest(f"{name} {text[:80]!r} is not a JSON object; {hint}", code=code, param=name)
    check_storable(parsed, name)
    return parsed


def _number(text: str) -> str | float:
    """Form values are texts: converted to a number if they read as one."""
    try:
        return float(text)
    except ValueError:
        return text
