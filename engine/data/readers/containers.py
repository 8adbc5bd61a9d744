"""Opens an uploaded file as bounded chunks of plain bytes, and detects its format by content.

Memory stays bounded whatever the file holds: a bomb is cut off at `max_bytes`, and every refusal is an ``InvalidDataset`` with a code of
``problems.CODES``, never an exception of a decompression library.
"""

from __future__ import annotations

import codecs
import gzip
import re
import shlex
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO, Literal

import zstandard

from core.errors import InvalidDataset
from engine.data.readers.encodings import UTF8, as_utf8, is_partly_utf8

DataFormat = Literal["jsonl", "json_array", "json_object", "csv", "parquet"]

CHUNK_BYTES = 1 << 18
ZSTD_INPUT_BYTES = 2048
"""Compressed bytes decoded at once: 4 bytes of zstd can expand to 128 KiB, so this limits one step to 64 MiB."""
SNIFF_BYTES = 1 << 16
MAX_DECODED_BYTES = 10 * 1024**3
"""Most decompressed bytes of a dataset: 10 GB, the largest supported size."""

GZIP, ZSTD, PARQUET, UTF8_BOM = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1", b"\xef\xbb\xbf"
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
"""First bytes of Office files before 2007."""
OTHER_OFFICE = {".doc": "a Word document", ".ppt": "a PowerPoint presentation", ".msg": "an Outlook message"}
"""Files with these first bytes that are not workbooks, by the end of their names."""
OPEN_DOCUMENT = b"application/vnd.oasis.opendocument.spreadsheet"
SEPARATOR_LINE = re.compile(rb"\"?sep=([^\w\s\"\x00-\x1f\x7f-\xff]|\t)\"?\r?\n", re.IGNORECASE)
"""First line of a CSV file that tells Excel its separator: a printable ASCII character, or a tab."""
QUOTED = re.compile(rb'"[^"]*"')
ARCHIVES = {b"PK\x03\x04": "a zip archive (or an Office file)", b"7z\xbc\xaf": "a 7z archive", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
KINDS = {
    b"\x89PNG": "a PNG image", b"\xff\xd8\xff": "a JPEG image", b"GIF8": "a GIF image", b"%PDF": "a PDF document",
    b"\x7fELF": "a program", b"MZ\x90": "a program", b"RIFF": "audio or video", b"OggS": "audio", b"ARROW1": "an Arrow file",
    b"SQLite format 3": "a SQLite database", b"\x93NUMPY": "a NumPy array", b"\x80\x02": "a pickle", b"\x80\x04": "a pickle",
}  # fmt: skip
MAX_COMPRESSION_RATIO, RATIO_FLOOR_BYTES = 128, 64 << 20
"""Most decompressed per stored bytes, once past the floor, so that a small file is read within a minute: with a tokenizer, chat rows
take a second per 1 to 2 MB. Measured (3,000 rows of JSONL with gzip -9 and zstd -3 to -19, of Parquet with snappy and zstd -3 to -19):
Banking77, GSM8K and the demo's tickets 2 to 15; Banking77 with one system prompt of 1, 2 and 4 KB in each row 40 to 76, 61 to 138 and 80
to 259. The floor is 15,000 rows with 4 KB."""
MIN_PACKED_ROW_BYTES, MIN_PLAIN_ROW_BYTES, ROWS_FLOOR = 10, 8, 10_000
"""Least stored bytes per row on average, once past the floor: of compressed files and Parquet, and of plain ones. Measured as above:
Banking77, whose rows are short, 13, and 16 with a system prompt; the demo's tickets 26, GSM8K 135. Rows of one sentence with a number in
it take 3 to 8: those must be uploaded uncompressed, where the shortest row, ``{"text":"a"}``, has 13."""
UTF32 = b"\xff\xfe\x00\x00"
UTF16 = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sniffed:
    format: DataFormat
    compression: Literal["gzip", "zstd"] | None
    bom: bool
    """The text starts with a UTF-8 byte order mark, which is skipped."""
    extension: str
    """Last part of the file's name, without a suffix for compression: ``jsonl``."""
    delimiter: str = ","
    """Separator of CSV."""
    skip_bytes: int = 0
    """Bytes before the first row or header: a byte order mark, and Excel's line that names the separator."""
    skip_lines: int = 0
    begins_object: bool = False
    """The text begins with a JSON object: the first row, or all of the file."""
    is_spread: bool = False
    """That object spans several lines."""
    is_utf8: bool = False
    """The text has characters beyond ASCII and is valid UTF-8 before decoding."""
    is_partly_utf8: bool = False
    """Parts of the text are UTF-8 and parts are not, before decoding."""

    @property
    def extension_agrees(self) -> bool:
        named = {"jsonl": "jsonl", "ndjson": "jsonl", "json": "json", "csv": "csv", "tsv": "csv", "parquet": "parquet"}.get(self.extension)
        return named is None or named == self.format or (named == "json" and self.format in ("json_array", "json_object", "jsonl"))


@dataclass(kw_only=True, slots=True)
class RowLimit:
    """Counts the rows of a file, and their decoded bytes if the reader knows them; refuses more than the file's stored bytes allow."""

    stored_bytes: int
    is_packed: bool
    """Compressed, or Parquet."""
    max_bytes: int
    rows: int = 0
    decoded_bytes: int = 0

    def take(self, rows: int, decoded_bytes: int = 0) -> None:
        self.rows += rows
        self.decoded_bytes += decoded_bytes
        _refuse_bomb(self.decoded_bytes, self.stored_bytes, self.max_bytes)
        least = MIN_PACKED_ROW_BYTES if self.is_packed else MIN_PLAIN_ROW_BYTES
        allowed = ROWS_FLOOR + self.stored_bytes // least
        if self.rows > allowed:
            raise refuse(
                "too_many_rows",
                f"the file has over {allowed} rows in {self.stored_bytes} stored bytes, under {least} bytes a row; "
                f"remove empty and repeated rows{', or upload it as JSONL without compression' if self.is_packed else ''}",
            )


@dataclass(kw_only=True, slots=True)
class Meter:
    """Progress of reading a file; updated by the reader."""

    total_bytes: int
    consumed: int = 0
    """Stored bytes, before decompression."""


def refuse(code: str, message: str, *, options: str = "") -> InvalidDataset:
    """The refusal of a file; `options` of ``ft check`` that would read it."""
    error = InvalidDataset(message, code=code)
    error.options = options
    return error


def sniff(path: Path, *, filename: str, max_bytes: int = MAX_DECODED_BYTES, encoding: str = UTF8) -> Sniffed:
    """Detects the format of `path` from its first bytes; the name decides only if the content is ambiguous."""
    with path.open("rb") as stream:
        magic = stream.read(16)
    compression = _compression(magic)
    extension = filename.lower().removesuffix(".gz").removesuffix(".zst").rsplit(".", 1)[-1] if "." in filename else ""
    if magic.startswith(PARQUET):
        if encoding != UTF8:
            raise refuse("wrong_encoding", f"{filename} is Parquet, whose text is always UTF-8; leave the encoding out")
        return Sniffed(format="parquet", compression=None, bom=False, extension=extension)
    stored = _head(chunks(path, max_bytes=max_bytes))
    _refuse_non_text(stored, filename, encoding)
    head = stored if encoding == UTF8 else _head(chunks(path, max_bytes=max_bytes, encoding=encoding))
    bom = head.startswith(UTF8_BOM)
    text = head.removeprefix(UTF8_BOM)
    separator = SEPARATOR_LINE.match(text)
    if separator:
        text = text[separator.end() :]
    start = text.lstrip()[:1]
    if not start:
        raise refuse("empty_file", f"{filename} holds only white space; write one JSON object per line")
    if start == b"[" and extension != "csv":
        fmt: DataFormat = "json_array" if not _lines_are_arrays(text) else "jsonl"
    elif start == b"{" or extension in ("jsonl", "ndjson", "json"):
        fmt = "jsonl"
    elif extension in ("csv", "tsv") or separator or _delimiter(text) is not None:
        fmt = "csv"
    else:
        raise refuse("unknown_format", f"{filename} is neither JSONL, nor a JSON array, nor CSV; write one JSON object per line")
    return Sniffed(
        format=fmt,
        compression=compression,
        bom=bom,
        extension=extension,
        delimiter=(separator[1].decode() if separator else _delimiter(text)) or ",",
        skip_bytes=len(head) - len(text),
        skip_lines=1 if separator else 0,
        begins_object=fmt == "jsonl" and start == b"{",
        is_spread=fmt == "jsonl" and text.split(None, 2)[:1] == [b"{"],
        is_utf8=_is_utf8(stored),
        is_partly_utf8=is_partly_utf8(stored),
    )


def _head(data: Iterator[bytes]) -> bytes:
    head = b""
    for chunk in data:
        head += chunk
        if len(head) >= SNIFF_BYTES:
            break
    return head[:SNIFF_BYTES]


def _is_utf8(head: bytes) -> bool:
    """Returns whether the text beyond ASCII is UTF-8, except for a character cut off at its end."""
    try:
        return not codecs.getincrementaldecoder(UTF8)().decode(head).isascii()
    except UnicodeDecodeError:
        return False


def chunks(path: Path, *, max_bytes: int = MAX_DECODED_BYTES, meter: Meter | None = None, encoding: str = UTF8) -> Iterator[bytes]:
    """Yields the bytes of `path`, decompressed, with text of another `encoding` converted to UTF-8.

    Refuses a damaged container, a bomb, and anything longer than `max_bytes`.
    """
    unpacked = _unpacked(path, max_bytes=max_bytes, meter=meter)
    return unpacked if encoding == UTF8 else as_utf8(unpacked, encoding)


def _unpacked(path: Path, *, max_bytes: int, meter: Meter | None) -> Iterator[bytes]:
    total = 0
    with path.open("rb") as stream:
        compression = _compression(stream.read(16))
        stored = stream.seek(0, 2)
        stream.seek(0)
        try:
            for chunk in {"gzip": _gzip, "zstd": _zstd, None: _plain}[compression](stream):
                total += len(chunk)
                _refuse_bomb(total, stored, max_bytes)
                if meter is not None:
                    meter.consumed = stream.tell()
                yield chunk
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise refuse(
                "truncated_container",
                f"the {compression} stream is damaged or ends early after {total} bytes; compress and upload it again",
            ) from error


def _refuse_bomb(total: int, stored: int, max_bytes: int) -> None:
    ratio = total // max(1, stored)
    if total > max_bytes:
        grown = f" ({ratio} times its {stored} bytes)" if ratio > 1 else ""
        raise refuse("file_too_large", f"the file is longer than {max_bytes} bytes decompressed{grown}; split it into several files")
    if total > RATIO_FLOOR_BYTES and ratio > MAX_COMPRESSION_RATIO:
        message = f"the file's {stored} bytes unpack to over {MAX_COMPRESSION_RATIO} times as much, as those of a decompression bomb do"
        raise refuse("file_too_large", f"{message}; remove repeated rows, or upload it as JSONL without compression")


def _plain(stream: BinaryIO) -> Iterator[bytes]:
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def _gzip(stream: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=stream, mode="rb") as unpacked:
        while chunk := unpacked.read(CHUNK_BYTES):
            yield chunk


def _zstd(stream: BinaryIO) -> Iterator[bytes]:
    decoder = zstandard.ZstdDecompressor().decompressobj()
    fresh = True
    while data := stream.read(ZSTD_INPUT_BYTES):
        while data:
            if decoder.eof:
                decoder, fresh = zstandard.ZstdDecompressor().decompressobj(), True
            if chunk := decoder.decompress(data):
                yield chunk
            fresh = False
            data = decoder.unused_data if decoder.eof else b""
    if not fresh and not decoder.eof:
        raise EOFError("zstd frame is not complete")


def _compression(magic: bytes) -> Literal["gzip", "zstd"] | None:
    return "gzip" if magic.startswith(GZIP) else "zstd" if magic.startswith(ZSTD) else None


def _refuse_non_text(head: bytes, filename: str, encoding: str) -> None:
    if not head:
        raise refuse("empty_file", f"{filename} is empty; write one JSON object per line")
    if head.startswith((GZIP, ZSTD, PARQUET)):
        raise refuse("unsupported_container", f"{filename} is compressed twice; compress it once")
    if head[257:262] == b"ustar":
        raise refuse("unsupported_container", f"{filename} is a tar archive; unpack it and upload each data file (.gz and .zst are fine)")
    _refuse_spreadsheet(head, filename)
    for magic, kind in ARCHIVES.items():
        if head.startswith(magic):
            raise refuse(
                "unsupported_container", f"{filename} is {kind}; unpack it and upload JSONL, CSV or Parquet (.gz and .zst are fine)"
            )
    for magic, kind in KINDS.items():
        if head.startswith(magic):
            raise refuse("binary_file", f"{filename} is {kind}, no dataset; upload JSONL, a JSON array, CSV or Parquet")
    if encoding == "utf-16":
        return
    if head.startswith(UTF16) or _looks_utf16(head):
        is_utf16 = head.startswith(UTF16[:2]) and not head.startswith(UTF32)
        options = "--encoding utf-16" if is_utf16 else ""
        message = f"{filename} is UTF-16 text; read it as such" if is_utf16 else f"{filename} is UTF-16 or UTF-32 text"
        raise refuse("unsupported_encoding", f"{message}{', or' if is_utf16 else ';'} save it as UTF-8", options=options)
    control = sum(head.count(c) for c in range(32) if c not in (9, 10, 11, 12, 13)) if len(head) else 0
    if control > len(head) * 0.05 and not head.lstrip(UTF8_BOM).lstrip()[:1] == b"{":
        raise refuse("binary_file", f"{filename} is binary, no dataset; upload JSONL, a JSON array, CSV or Parquet")


def _refuse_spreadsheet(head: bytes, filename: str) -> None:
    """Refuses a workbook: its owner must choose the sheet with the rows and evaluate its formulas."""
    if head.startswith(OLE) and (other := OTHER_OFFICE.get(PurePath(filename.lower()).suffix)):
        raise refuse("binary_file", f"{filename} is {other}, no dataset; upload JSONL, a JSON array, CSV or Parquet")
    is_excel = head.startswith(OLE) or (head.startswith(b"PK") and (b"xl/" in head or filename.lower().endswith((".xlsx", ".xlsm"))))
    if is_excel:
        how = "in Excel choose File > Save As > 'CSV UTF-8 (Comma delimited) (*.csv)', in LibreOffice 'Text CSV' with 'Unicode (UTF-8)'"
    elif head.startswith(b"PK") and OPEN_DOCUMENT in head[:200]:
        how = "in LibreOffice choose File > Save As > 'Text CSV' with the character set 'Unicode (UTF-8)'"
    else:
        return
    kind, target = (
        "an Excel workbook" if is_excel else "an OpenDocument spreadsheet",
        shlex.quote(f"{PurePath(filename).stem or 'rows'}.csv"),
    )
    raise refuse("unsupported_container", f"{filename} is {kind}; {how}, one sheet at a time, then run `ft check {target}`")


def _looks_utf16(head: bytes) -> bool:
    """Returns whether the text is ASCII in UTF-16 without a mark: every other byte is zero."""
    sample = head[:400]
    return len(sample) >= 4 and max(sample[::2].count(0), sample[1::2].count(0)) > len(sample) * 0.4


def _lines_are_arrays(text: bytes) -> bool:
    """Returns True for JSONL whose rows are arrays (each a bad row), False for one array over the file."""
    lines = [line.strip() for line in text.splitlines()[:4] if line.strip()]
    return len(lines) > 2 and all(line.startswith(b"[") and line.endswith(b"]") for line in lines[:3])


def _delimiter(text: bytes) -> str | None:
    """Returns the separator of the header line outside of its quotes, None if it has none."""
    header = QUOTED.sub(b"", text.splitlines()[0]) if text.splitlines() else b""
    counts = {d: header.count(d.encode()) for d in (",", "\t", ";")}
    best = max(counts, key=lambda d: counts[d])
    return best if counts[best] else None
