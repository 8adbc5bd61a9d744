"""Libraries for constrained decoding: seconds to compile a JSON schema, and to compute the mask of the next token.

    uv pip install --no-deps --target /tmp/grammars llguidance==1.9.1 outlines-core==0.2.14 xgrammar==0.2.8 apache-tvm-ffi==0.1.15.post2
    PYTHONPATH=/tmp/grammars python -m benchmarks.serving.constrained [--out benchmarks/serving_constrained_cpu_202611.json]

Each library compiles each schema without a cache and then walks through a document that follows the schema, token by token,
computing a mask computing a mask before each token. Times are CPU time of the process, which holds on a machine that others use too. The
vocabularies are the demo model's, and the same with 15,000 to 16,000 words of the sources of Python's standard library.
Of the keywords of JSON Schema, `ignored` are those that a library neither enforces nor refuses: it accepted a document that
violates them; `unbounded` those that took more than 3 CPU seconds. A library that is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import resource
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

BASE = Path(__file__).resolve().parents[2] / "examples/demo/base_model"
END, LIMIT_S = "<|im_end|>", 3
BOOK = {"type": "object", "properties": {"category": {"enum": ["fantasy", "horror", "humor", "adventure"]}}, "required": ["category"]}
TREE = {"type": "object", "properties": {"name": {"type": "string"}, "of": {"type": "array", "items": {"$ref": "#"}}}, "required": ["name"]}
FIELDS: dict[str, Any] = {f"field_{i}": {"type": ["string", "integer", "boolean"][i % 3]} for i in range(30)}
SCHEMAS: dict[str, tuple[dict[str, Any], Any]] = {
    "one of four words": ({**BOOK, "additionalProperties": False}, {"category": "horror"}),
    "30 fields": (
        {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False},
        {name: ["some words of text", 12345, True][i % 3] for i, name in enumerate(FIELDS)},
    ),
    "array of objects": (
        {"type": "object", "properties": {"rows": {"type": "array", "items": BOOK}}, "required": ["rows"], "additionalProperties": False},
        {"rows": [{"category": "humor"}] * 12},
    ),
    "one of 1,000 words": ({"enum": [f"label {i * 7919}" for i in range(1000)]}, "label 39595"),
    "recursive": ({**TREE, "additionalProperties": False}, {"name": "a", "of": [{"name": "b", "of": [{"name": "c"}]}]}),
}
VIOLATIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "enum": ({"enum": ["a", "b"]}, "c"),
    "pattern": ({"type": "string", "pattern": "^[a-z]+$"}, "A1"),
    "maxLength": ({"type": "string", "maxLength": 2}, "abc"),
    "maximum": ({"type": "integer", "maximum": 10}, 11),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, 7),
    "maxItems": ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, [1, 2]),
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1]),
    "format": ({"type": "string", "format": "date"}, "tomorrow"),
    "minProperties": ({"type": "object", "minProperties": 1}, {}),
    "not": ({"type": "string", "not": {"const": "a"}}, "a"),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}, 7),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 3),
    "if": ({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 5}}, 7),
    "dependentRequired": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "dependentRequired": {"a": ["b"]}},
        {"a": 1},
    ),
}


class Library(Protocol):
    package: str

    def compile(self, schema: str) -> Any: ...
    def start(self, compiled: Any) -> tuple[Callable[[], object], Callable[[int], bool], Callable[[], bool]]:
        """Computes a mask; takes a token, False if it is not allowed; whether the document may end."""


class Llguidance:
    package = "llguidance"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import llguidance

        self._matcher, self._size = llguidance.LLMatcher, tokenizer.get_vocab_size()
        self._tokenizer = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=self._size, eos_token=tokenizer.token_to_id(END))

    def compile(self, schema: str) -> Any:
        matcher = self._matcher(self._tokenizer, self._matcher.grammar_from_json_schema(schema), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def start(self, compiled: Any) -> tuple[Callable[[], object], Callable[[int], bool], Callable[[], bool]]:
        matcher = compiled.deep_copy()
        return matcher.compute_bitmask, matcher.consume_token, matcher.is_accepting


class Xgrammar:
    package = "xgrammar"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        self._xgrammar, self._size = xgrammar, tokenizer.get_vocab_size()
        tokens = [tokenizer.id_to_token(i) or "" for i in range(self._size)]
        info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[tokenizer.token_to_id(END)])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: str) -> Any:
        return self._compiler.compile_json_schema(schema)

    def start(self, compiled: Any) -> tuple[Callable[[], object], Callable[[int], bool], Callable[[], bool]]:
        matcher = self._xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        mask = self._xgrammar.allocate_token_bitmask(1, self._size)
        return lambda: matcher.fill_next_token_bitmask(mask), matcher.accept_token, matcher.is_terminated


class OutlinesCore:
    package = "outlines-core"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import outlines_core

        self._outlines, self._size, self._end = outlines_core, tokenizer.get_vocab_size(), tokenizer.token_to_id(END)
        raw = {char: byte for byte, char in bytes_of_characters()}
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        tokens: dict[str | bytes, list[int]] = {}
        for token, i in tokenizer.get_vocab().items():
            if token not in special:
                tokens.setdefault(bytes(raw[c] for c in token), []).append(i)
        self._vocabulary = outlines_core.Vocabulary(self._end, tokens)

    def compile(self, schema: str) -> Any:
        from outlines_core.json_schema import build_regex_from_schema

        return self._outlines.Index(build_regex_from_schema(schema), self._vocabulary)

    def start(self, compiled: Any) -> tuple[Callable[[], object], Callable[[int], bool], Callable[[], bool]]:
        guide = self._outlines.Guide(compiled)
        mask = np.zeros((self._size + 31) // 32, dtype=np.int32)

        def take(token: int) -> bool:
            try:
                guide.advance(token, return_tokens=False)
            except ValueError:
                return False
            return True

        return lambda: guide.write_mask_into(mask.ctypes.data, mask.size, 4), take, lambda: self._end in guide.get_tokens()


LIBRARIES: dict[str, Callable[[Any], Library]] = {"llguidance": Llguidance, "xgrammar": Xgrammar, "outlines-core": OutlinesCore}


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    result = work()
    return result, (time.process_time() - started) * 1000


def measure(library: Library, tokenizer: Tokenizer, repeats: int) -> dict[str, Any]:
    """By schema: milliseconds to compile it, and microseconds of the masks of its document."""
    rows: dict[str, Any] = {}
    for name, (schema, document) in SCHEMAS.items():
        text = json.dumps(schema)
        try:
            compiled = [timed(lambda text=text: library.compile(text)) for _ in range(repeats)]
        except Exception as e:
            rows[name] = {"refused": str(e)[:120]}
            continue
        masks = [us for run in range(repeats) for us in walk(library, compiled[run][0], tokens_of(tokenizer, document))]
        rows[name] = {
            "compile_ms": round(statistics.median(ms for _, ms in compiled), 2),
            "mask_us_median": round(statistics.median(masks), 1),
            "mask_us_mean": round(statistics.fmean(masks), 1),
            "mask_us_max": round(max(masks), 1),
        }
    return rows


def tokens_of(tokenizer: Tokenizer, document: Any) -> list[int]:
    return list(tokenizer.encode(json.dumps(document), add_special_tokens=False).ids)


def walk(library: Library, compiled: Any, tokens: list[int]) -> Iterator[float]:
    mask, take, _ = library.start(compiled)
    for token in tokens:
        yield timed(mask)[1] * 1000
        assert take(token), "the document follows the schema"


def keywords(library: Library, tokenizer: Tokenizer) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"enforced": [], "refused": [], "ignored": [], "unbounded": []}
    for keyword, (schema, document) in VIOLATIONS.items():
        found[in_child(lambda schema=schema, document=document: verdict(library, tokenizer, schema, document))].append(keyword)
    return found


def verdict(library: Library, tokenizer: Tokenizer, schema: dict[str, Any], document: Any) -> str:
    try:
        mask, take, may_end = library.start(library.compile(json.dumps(schema)))
    except Exception:
        return "refused"
    accepted = True
    for token in tokens_of(tokenizer, document):
        mask()
        accepted = accepted and take(token)
    return "ignored" if accepted and may_end() else "enforced"


def in_child(work: Callable[[], str]) -> str:
    """What `work` returns in a child process; ``unbounded`` if the kernel ended it after ``LIMIT_S`` CPU seconds."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + LIMIT_S, used + LIMIT_S))
        os.write(writer, work().encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said or "unbounded"


def bytes_of_characters() -> Iterator[tuple[int, str]]:
    """Each byte with the character that stands for it in a byte-level vocabulary: printable ones for themselves, the others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    yield from ((byte, chr(byte)) for byte in printable)
    yield from ((byte, chr(256 + i)) for i, byte in enumerate(b for b in range(256) if b not in printable))


def larger(tokenizer: Tokenizer) -> Tokenizer:
    """`tokenizer` with words, half of them behind a space."""
    sources = (p.read_text(errors="replace") for p in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py")))
    words = {word for text in sources for word in re.findall(r" ?[a-zA-Z_]{3,}", text)}
    state = json.loads(tokenizer.to_str())
    known = state["model"]["vocab"]
    first = tokenizer.get_vocab_size()
    new = [w for word in sorted(words) if (w := word.replace(" ", "\u0120")) not in known]
    known |= {word: first + i for i, word in enumerate(new)}
    return Tokenizer.from_str(json.dumps(state))


def run(name: str, tokenizer: Tokenizer, repeats: int) -> dict[str, Any]:
    library, ms = timed(lambda: LIBRARIES[name](tokenizer))
    row = {"version": importlib.metadata.version(name), "vocabulary": tokenizer.get_vocab_size(), "setup_ms": round(ms, 1)}
    return {"library": name, **row, "schemas": measure(library, tokenizer, repeats), "keywords": keywords(library, tokenizer)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--library", action="append", choices=list(LIBRARIES))
    parser.add_argument("--out", type=Path, help="written anew, or with the rows of a chosen library added")
    args = parser.parse_args(arguments)
    before, rows = os.getloadavg(), []
    demo = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    for name in args.library or LIBRARIES:
        for tokenizer in (demo, larger(demo)):
            try:
                rows.append(run(name, tokenizer, args.repeats))
            except ImportError as e:
                rows.append({"library": name, "not_installed": str(e)})
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        kept = json.loads(args.out.read_text())["rows"] if args.library and args.out.exists() else []
        rows = [row for row in kept if row["library"] not in args.library] + rows
        found = {"machine": {"cpus": os.cpu_count(), "load_before": before, "load_after": os.getloadavg()}, "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
