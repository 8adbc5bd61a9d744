"""Files for fuzzing: valid ones of every container and shape, and structured damage to them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

TALK = [{"role": "user", "content": "Where is my card?"}, {"role": "assistant", "content": "On its way \U0001f642 \u00e9"}]
CALL = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]}
ROWS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"messages": TALK, "id": n, "score": 0.5, "tags": [None, True]} for n in range(3)],
    "tools": [{"messages": [TALK[0], CALL, {"role": "tool", "content": "x", "tool_call_id": "c"}, TALK[1]], "tools": [{"name": "f"}]}] * 2,
    "sharegpt": [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 1}], "system": "s"}] * 2,
    "alpaca": [{"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]}] * 2,
    "completion": [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "\u65e5\u672c"}],
    "kto": [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "c", "label": False}],
    "preference": [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2,
    "hh": [{"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}] * 2,
    "openai": [{"input": {"messages": TALK[:1]}, "preferred_output": TALK[1:], "non_preferred_output": [{**TALK[1], "content": "x"}]}] * 2,
    "text": [{"text": "Call me Ishmael.\nSome years ago"}, {"text": "### Human: a### Assistant: b", "category": "d"}],
}
MAPS: list[dict[str, str] | None] = [
    None, None, None, {"text": "prompt", "category": "completion"}, {"chosen": "chosen:transcript", "rejected": "rejected:transcript"},
    {"messages": "messages"}, {"text": "messages:transcript"}, {"prompt": "text"},
]  # fmt: skip
NAMES = ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.jsonl.zst", "a", "a.zip", "\u00e9 \n.jsonl"]
JUNK = [
    *(b"\0", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b'"', b"\\", b"\n", b"\r", b"\r\n\n", b","),
    *(b"{", b"}", b"[", b"]", b"NaN", b"-Infinity", b"1e999", b"null", b"true", b'"messages":1,', b'"a":1,"a":2', b"[" * 70),
    *(b"9" * 5000, b"<s>[INST]", b"Human:", b"PAR1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xff\xfe", b"\x80", b"\xc0\x80"),
    *("\u2028".encode(), b"'", b";", b"\t", b"-", b"0x1", b"\x0c", b"\x85"),
]
VALUES: list[Any] = [
    None, True, 0, -1, 1e308, 10**30, "", " ", "x", "\ud800", "\0", [], {}, [[]], [None], {"": None}, {"a": {}}, "Human: a\n\nAssistant: b",
    "[INST] a [/INST] b", "system", "assistant", [1, "a"], {"role": "user", "content": "x"}, {"from": "gpt", "value": "x"}, 10**400,
]  # fmt: skip


def as_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(r).encode() + b"\n" for r in rows)


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), extrasaction="ignore")
    writer.writeheader()
    writer.writerows({k: v if isinstance(v, str) else json.dumps(v) for k, v in r.items()} for r in rows)
    return out.getvalue().encode("utf-8", "surrogatepass")


def as_parquet(rows: list[dict[str, Any]], compression: str = "zstd") -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out, compression=compression, write_page_index=True)
    return out.getvalue()


CONTAINERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "jsonl": as_jsonl,
    "plain jsonl": lambda rows: "\n".join(json.dumps(r, ensure_ascii=False) for r in rows).encode("utf-8", "surrogatepass"),
    "array": lambda rows: json.dumps(rows, indent=1).encode(),
    "csv": as_csv,
    "parquet": as_parquet,
    "parquet without compression": lambda rows: as_parquet(rows, "none"),
    "gzip": lambda rows: gzip.compress(as_jsonl(rows), 1),
    "zstd": lambda rows: zstandard.compress(as_jsonl(rows)),
    "gzip of csv": lambda rows: gzip.compress(as_csv(rows), 1),
    "gzip of an array": lambda rows: gzip.compress(json.dumps(rows).encode(), 1),
    "utf-16": lambda rows: as_jsonl(rows).decode().encode("utf-16"),
}


def damage(rng: random.Random, data: bytes) -> bytes:
    """One of: cut, flip, insert, remove, repeat, swap."""
    at = rng.randrange(len(data) + 1)
    to = min(len(data), at + rng.randrange(1, 40))
    choice = rng.randrange(6)
    if choice == 0:
        return data[:at] if rng.random() < 0.5 else data[at:]
    if choice == 1 and data:
        place = min(at, len(data) - 1)
        return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
    if choice == 2:
        return data[:at] + rng.choice(JUNK) + data[at:]
    if choice == 3:
        return data[:at] + data[to:]
    if choice == 4:
        return data[:at] + data[at:to] * rng.randrange(2, 5) + data[to:]
    other = rng.randrange(len(data) + 1)
    return data[:at] + data[other : other + 20] + data[at:]


def spoil(rng: random.Random, value: Any) -> Any:
    """`value` with something inside it replaced, removed or put twice."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        out = dict(value)
        key = rng.choice(list(out))
        choice = rng.random()
        if choice < 0.15:
            del out[key]
        elif choice < 0.3:
            out[rng.choice(["role", "content", "messages", "text", "label", "tools", "weight", "from", "input", "x"])] = rng.choice(VALUES)
        else:
            out[key] = spoil(rng, out[key])
        return out
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        return [*value[:place], spoil(rng, value[place]), *value[place + rng.randrange(2) :]]
    return rng.choice(VALUES)


def any_file(rng: random.Random) -> tuple[bytes, str, dict[str, str] | None]:
    """(bytes, name, column map) of one input: spoiled rows in a container, damaged."""
    rows = rng.choice(list(ROWS.values()))
    for _ in range(rng.randrange(3)):
        rows = [spoil(rng, r) if rng.random() < 0.6 else r for r in rows]
    rows = [r for r in rows if isinstance(r, dict)] or [{"text": "a"}]
    try:
        data = CONTAINERS[rng.choice(list(CONTAINERS))](rows)
    except (pa.ArrowException, UnicodeEncodeError, ValueError, OverflowError, TypeError, IndexError):
        data = as_jsonl(rows)  # what the container cannot hold
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        data = damage(rng, data)
    if rng.random() < 0.1:
        data = gzip.compress(data, 1) if rng.random() < 0.5 else zstandard.compress(data)
    return data, rng.choice(NAMES), rng.choice(MAPS)
