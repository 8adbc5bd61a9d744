"""Column maps and transcripts: what is mapped is read as it was meant, and what needs a map is refused with the map to use."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from core.errors import InvalidDataset
from engine.data import shapes
from engine.data.checks.turn_order import order_problems
from engine.data.problems import Problem
from engine.data.readers.row_stream import apply_map, open_rows, parse_column_map
from engine.data.readers.transcripts import split_transcript, transcript_marks
from engine.data.schema import Example
from tests.engine.data.examples_of import shared_file

TALK = [("user", "Hi"), ("assistant", "Hello.\n\nHow are you?"), ("user", "Fine"), ("assistant", "Good")]
TRANSCRIPTS = {
    "HH-RLHF": "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHow are you?\n\nHuman: Fine\n\nAssistant: Good",
    "users and bots": "User: Hi\n\nBot: Hello.\n\nHow are you?\n\nUser: Fine\n\nBot: Good\n",
    "users and an AI": "User: Hi\n\nAI: Hello.\n\nHow are you?\n\nUser: Fine\n\nAI: Good\n",
    "single line breaks": "Human: Hi\nAssistant: Hello.\n\nHow are you?\nHuman: Fine\nAssistant: Good",
    "headings": "### Human: Hi\n### Assistant: Hello.\n\nHow are you?\n### Human: Fine\n### Assistant: Good",
    "headings without line breaks": "### Human: Hi### Assistant: Hello.\n\nHow are you?### Human: Fine### Assistant: Good",
    "instructions": "### Instruction:\nHi\n\n### Response:\nHello.\n\nHow are you?\n### Instruction:\nFine\n### Response:\nGood",
    "Llama 2": "<s>[INST] Hi [/INST] Hello.\n\nHow are you? </s><s>[INST] Fine [/INST] Good </s>",
    "Llama 2 without begin and end": "[INST] Hi [/INST] Hello.\n\nHow are you? [INST] Fine [/INST] Good",
}


@pytest.mark.parametrize("case", TRANSCRIPTS)
def test_a_transcript_is_split_into_its_turns(case: str) -> None:
    assert split_transcript(TRANSCRIPTS[case]) == TALK
    assert transcript_marks(TRANSCRIPTS[case])


def test_a_system_prompt_of_a_transcript_is_kept() -> None:
    assert split_transcript("<s>[INST] <<SYS>>\nBe kind\n<</SYS>>\n\nHi [/INST] Hello </s>") == [
        ("system", "Be kind"), ("user", "Hi"), ("assistant", "Hello"),
    ]  # fmt: skip
    assert split_transcript("System: Be kind\n\nHuman: Hi\n\nAssistant: Hello") == [
        ("system", "Be kind"), ("user", "Hi"), ("assistant", "Hello"),
    ]  # fmt: skip


def test_marks_of_another_kind_inside_a_turn_are_part_of_it() -> None:
    text = "\n\nHuman: Write a dialogue\n\nAssistant: Sure.\n\nUser: Hi\n\nBot: Hello\n\nHuman: Thanks\n\nAssistant: Bye"
    assert split_transcript(text) == [
        ("user", "Write a dialogue"), ("assistant", "Sure.\n\nUser: Hi\n\nBot: Hello"), ("user", "Thanks"), ("assistant", "Bye"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Humanity: a history",
        "He said:\n\nHuman: no",
        "Human: only one side",
        "AI: the future",
        "User: manual",
        "[INST] half",
        "See ### Human: x",
    ],
)
def test_prose_is_no_transcript(text: str) -> None:
    assert transcript_marks(text) is None


def read(value: dict[str, Any]) -> tuple[Example | None, list[Problem]]:
    found = shapes.detect_shape(value)
    assert found is not None
    return shapes.to_example(value, found[0], row=1)


HH = TRANSCRIPTS["HH-RLHF"]
REFUSED = {
    "both answers": ({"chosen": HH, "rejected": HH + "!"}, "--map chosen=chosen:transcript,rejected=rejected:transcript"),
    "the prompt alone": (
        {"prompt": "Human: a\n\nAssistant: b\n\nHuman: c", "chosen": "x", "rejected": "y"},
        "--map prompt=prompt:transcript,chosen=chosen,rejected=rejected",
    ),
    "the prompt of a completion": (
        {"prompt": "Human: a\n\nAssistant:", "completion": "x", "tools": []},
        "--map prompt=prompt:transcript,completion=completion,tools=tools",
    ),
    "a text": ({"text": TRANSCRIPTS["headings"]}, "--map text=messages:transcript"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_row_with_a_transcript_is_refused_with_the_map_to_use_and_that_map_reads_it(case: str) -> None:
    value, wanted = REFUSED[case]
    example, problems = read(value)
    assert example is None
    assert [p.code for p in problems] == ["transcript_text"]
    assert "holds a whole conversation written as text with '" in problems[0].message
    assert wanted in problems[0].fix
    mapped = apply_map(value, parse_column_map(wanted.removeprefix("--map ")), True)
    assert isinstance(mapped, dict)
    example, problems = read(mapped)
    assert problems == []
    assert example is not None
    assert list(order_problems(example)) == []


def test_the_map_of_a_refusal_names_the_columns_of_the_file() -> None:
    mapped = apply_map({"good": HH, "bad": HH}, {"good": "chosen", "bad": "rejected"}, True)
    assert isinstance(mapped, dict)
    _, problems = read(mapped)
    assert "--map good=chosen:transcript,bad=rejected:transcript" in problems[0].fix


def test_a_text_that_is_mapped_as_text_is_trained_as_it_stands() -> None:
    mapped = apply_map({"text": HH}, {"text": "text"}, True)
    assert isinstance(mapped, dict)
    example, problems = read(mapped)
    assert (problems, example and example.text) == ([], HH)


@pytest.mark.parametrize(
    ("value", "code"), [({"c": "plain text"}, "transcript_text"), ({"c": [1]}, "wrong_type"), ({"d": HH}, "missing_field")]
)
def test_what_is_mapped_as_a_transcript_must_be_one(value: dict[str, Any], code: str) -> None:
    problem = apply_map(value, {"c": "chosen:transcript"}, True)
    assert isinstance(problem, Problem)
    assert (problem.path, problem.code) == ("c", code)


def test_a_column_map_is_parsed() -> None:
    assert parse_column_map(" text = prompt, category=completion ") == {"text": "prompt", "category": "completion"}
    assert parse_column_map("a=b=chosen:transcript") == {"a=b": "chosen:transcript"}


@pytest.mark.parametrize(
    "text",
    ["", "text", "text=", "=prompt", "a=prompt,,b=completion", "a=promt", "a=text:transcript", "a=prompt:script",
     "a=prompt,a=completion", "a=prompt,b=prompt"],
)  # fmt: skip
def test_a_column_map_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidDataset) as caught:
        parse_column_map(text)
    assert caught.value.code == "unknown_column"


def tally(path: Path, column_map: dict[str, str] | None) -> tuple[Counter[str], list[Example]]:
    codes: Counter[str] = Counter()
    examples = []
    for row in open_rows(path, filename=path.name, column_map=column_map).rows:
        found = shapes.detect_shape(row.value)
        example, problems = shapes.to_example(row.value, found[0], row=row.number) if found else (None, [shapes.unknown_shape(row.value)])
        problems = problems or list(order_problems(example)) if example else problems
        codes.update({p.code for p in problems})
        if example is not None and not problems:
            examples.append(example)
    return codes, examples


def test_hh_rlhf_is_refused_with_a_map_that_reads_it() -> None:
    path = shared_file("hh_rlhf_harmless_test.jsonl.gz")
    num_rows = len(gzip.decompress(path.read_bytes()).splitlines())
    codes, examples = tally(path, None)
    assert codes == {"transcript_text": num_rows}
    assert examples == []
    codes, examples = tally(path, parse_column_map("chosen=chosen:transcript,rejected=rejected:transcript"))
    assert len(examples) + sum(codes.values()) >= num_rows
    assert len(examples) > 0.95 * num_rows
    assert set(codes) <= {"last_not_assistant", "empty_content", "identical_preference", "missing_field"}
    assert {e.kind for e in examples} == {"preference"}
    assert all(e.messages and e.messages[-1].role == "user" for e in examples)


def test_gsm8k_says_how_to_map_it() -> None:
    path = shared_file("gsm8k_test.jsonl")
    row = json.loads(path.read_text().splitlines()[0])
    assert shapes.detect_shape(row) is None
    fix = shapes.unknown_shape(row).fix
    assert "--map question=prompt,answer=completion" in fix
    codes, examples = tally(path, parse_column_map(fix.rpartition(" ")[2]))
    assert (dict(codes), len(examples)) == ({}, 1319)


def test_banking77_is_explained_before_it_trains_as_text() -> None:
    row = next(open_rows(shared_file("banking77_test.csv"), filename="banking77_test.csv").rows)
    assert shapes.detect_shape(row.value) == ("text", "rows have 'text', and 'category' is read by nothing")
    assert "--map text=prompt,category=completion" in (shapes.advice(row.value) or ("", ""))[1]
