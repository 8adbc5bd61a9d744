"""A job's metrics as an event file of TensorBoard: records of a length, a serialized ``Event`` and the checksums of both.

The two messages that scalars need are written here, because TensorBoard's own writer would bring 29 MB, two more servers' libraries and two
seconds of imports into the API, and tensorboardX imports torch where it is installed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from crc32c import crc32c

from control_plane.jobs import results
from control_plane.jobs.tables import Job
from control_plane.platform.context import Platform

LEFT_OUT = frozenset({"step", "time"})
"""The coordinates of a step, which are not tags."""
MOST = 3.4028234663852886e38
"""Largest value of TensorBoard's scalars; the perplexity of a diverged run is larger."""
VERSION = "brain.Event:2"
"""What TensorBoard expects in the first event of a file."""
DOUBLE, VARINT, BYTES, FLOAT = 1, 0, 2, 5
"""Wire types of protocol buffers; in field keys beside the numbers from TensorFlow's ``event.proto`` and ``summary.proto``."""


def filename(job: Job) -> str:
    """Return a name by which TensorBoard recognizes the file; its directory is the run's name."""
    return f"events.out.tfevents.{job.created_at.timestamp():.0f}.{job.id}"


def event_file(platform: Platform, job: Job) -> BinaryIO:
    """Return the metrics so far, one event per step with a scalar per tag; if a step was trained twice, the last values count.

    Reads and writes step by step: a job of 100,000 steps takes as little memory as one of ten.
    """
    out = results.opened()
    created_s = job.created_at.timestamp()
    out.write(_record(_event(created_s, 0, _field(3, BYTES, VERSION.encode()))))
    for line in results.steps(platform, job.measured_by):
        tags = {tag: value for tag, value in line.items() if tag not in LEFT_OUT and _is_number(value)}
        if tags:
            out.write(_record(_event(float(line.get("time", created_s)), int(line["step"]), _field(5, BYTES, _summary(tags)))))
    out.seek(0)
    return out


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """Return the CRC-32C of `data`, masked as in TFRecord files."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _event(wall_time_s: float, step: int, what: bytes) -> bytes:
    return _field(1, DOUBLE, struct.pack("<d", wall_time_s)) + _field(2, VARINT, _varint(step)) + what


def _summary(tags: Mapping[str, float]) -> bytes:
    return b"".join(_values(tags))


def _values(tags: Mapping[str, float]) -> Iterator[bytes]:
    for tag, value in tags.items():
        scalar = _field(1, BYTES, tag.encode()) + _field(2, FLOAT, struct.pack("<f", max(-MOST, min(value, MOST))))
        yield _field(1, BYTES, scalar)


def _field(number: int, wire_type: int, content: bytes) -> bytes:
    length = _varint(len(content)) if wire_type == BYTES else b""
    return _varint(number << 3 | wire_type) + length + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
