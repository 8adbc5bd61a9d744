"""Reasoning in rows, turns that a chat template rewrites in history, and rows that it refuses: one verdict in check, preview and pack."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from core.errors import InvalidDataset
from engine.data.ingest import Policies, load_rows, validate_file
from engine.data.packs.build import PackSettings, build_pack
from engine.data.row_preview import preview, preview_lines
from engine.data.schema import Example, Message
from engine.data.tokens.assistant_turns import reasoning_of
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.data.tokens.loss_mask import IGNORE
from tests.engine.data.tokens.test_templates import build

ASKED = {"role": "user", "content": "How much is 1+1?"}
THOUGHT = {"role": "assistant", "content": "It is 2.", "reasoning_content": "One and one make two."}
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}{{ '<|im_start|>assistant/analysis\\n' + m.thinking + '<|im_end|>' }}{% endif %}"
    "{{ '<|im_start|>assistant/final\\n' + m.content + ('<|endoftext|>' if loop.last else '<|im_end|>') }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
"""Like gpt-oss: the reasoning is called ``thinking``, the last turn alone shows it, and ends with another token than history does."""


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("reasoning") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("reasoning") / "chatml", "chatml")


def chat(*turns: tuple[str, str] | Message) -> Example:
    messages = (t if isinstance(t, Message) else Message(role=t[0], content=t[1]) for t in turns)  # type: ignore[arg-type]
    return Example(kind="chat", messages=tuple(messages), row=1)


def trained(tokenizer: ChatTokenizer, example: Example) -> list[str]:
    """The runs of text with loss."""
    labels = tokenizer.encode(example, max_seq_len=10**6).labels
    edges = np.flatnonzero(np.diff(np.concatenate(([0], labels != IGNORE, [0])))).reshape(-1, 2)
    return [tokenizer.decode(labels[start:end].tolist()) for start, end in edges.tolist()]


def check(path: Path, model: Path | None = None, **policies: Any) -> Any:
    length = None if model is None else 4096
    return validate_file(
        path, filename=path.name, policies=Policies(min_examples=1, **policies), model_dir=model, max_seq_len=length
    ).report


def test_other_fields_about_reasoning_are_named(jsonl: Callable[..., Path]) -> None:
    details = [{"type": "reasoning.text", "text": "hm"}]
    report = check(jsonl(*({"messages": [ASKED, {"role": "assistant", "content": f"{i}", "reasoning_details": details}]} for i in "abc")))
    warned = {w["code"]: w["message"] for w in report.warnings}
    assert warned["unknown_field"] == "'messages[].reasoning_details' is read by nothing (3 rows)"
    assert "reasoning_not_checked" not in warned


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_fields_are_rendered_by_the_template(field: str, qwen3: Path, jsonl: Callable[..., Path], tmp_path: Path) -> None:
    file = jsonl({"messages": [ASKED, {"role": "assistant", "content": "It is 2.", field: "One and one make two."}]})
    result = validate_file(file, filename="r.jsonl", policies=Policies(min_examples=1), output=tmp_path / "rows.parquet")
    assert [w["code"] for w in result.report.warnings if w["code"] == "unknown_field"] == []
    (example,) = load_rows(tmp_path / "rows.parquet")
    tokenizer = ChatTokenizer.load(qwen3)
    assert trained(tokenizer, example) == ["<think>\nOne and one make two.\n</think>\n\nIt is 2.<|im_end|>"]


def test_the_other_name_of_the_field_reaches_a_template_that_reads_it(tmp_path: Path) -> None:
    directory = build(tmp_path / "harmony", "chatml")
    (directory / "chat_template.jinja").write_text(HARMONY)
    tokenizer = ChatTokenizer.load(directory)
    answers = [Message(role="assistant", content=c, reasoning=r) for c, r in (("2", "easy"), ("4", "twice"))]
    single = "/analysis\neasy<|im_end|><|im_start|>assistant/final\n2<|endoftext|>"
    assert trained(tokenizer, chat(("user", "1+1?"), answers[0])) == [single]
    example = chat(("user", "1+1?"), answers[0], ("user", "2+2?"), answers[1])
    assert tokenizer.encode(example, max_seq_len=1000).turns == ("rewritten_in_history", "loss")
    assert trained(tokenizer, example) == [single.replace("easy", "twice").replace("2", "4")]


def test_a_turn_carries_loss_only_if_it_reads_as_when_it_was_the_answer(qwen3: Path) -> None:
    """For each conversation, the text with loss is what the same conversation, ended there, would train."""
    tokenizer = ChatTokenizer.load(qwen3)
    think = "<think>\nhm\n</think>\n\n"
    seen = set()
    for first in ("a", think + "a"):
        for second in ("b", think + "b"):
            turns = (("user", "1"), ("assistant", first), ("user", "2"), ("assistant", second))
            whole = tokenizer.encode(chat(*turns), max_seq_len=1000)
            assert trained(tokenizer, chat(*turns)) == [
                f"{think if think in second else '<think>' + chr(10) * 2 + '</think>' + chr(10) * 2}b<|im_end|>"
            ]
            for everywhere in (False, True):
                labels = tokenizer.encode(chat(*turns), max_seq_len=1000, train_on_inputs=everywhere).labels
                said = tokenizer.decode([t for t in labels.tolist() if t != IGNORE])
                assert "a<|im_end|>" not in said
            seen.add(whole.turns)
    assert seen == {("rewritten_in_history", "loss")}


def test_rows_whose_only_turn_of_weight_1_carries_no_loss_are_told_and_left_out(
    qwen3: Path, jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    rows = [
        {"messages": [ASKED, {"role": "assistant", "content": f"{i}."}, ASKED, {"role": "assistant", "content": f"{i}!", "weight": last}]}
        for i, last in enumerate((1, 1, 0, 0, 0))
    ]
    report = check(jsonl(*rows), qwen3, near_duplicates="off")
    (warning,) = [w["message"] for w in report.warnings if w["code"] == "turns_without_loss"]
    assert "; 3 of these rows have no other turn of weight 1 and are left out of training" in warning
    validate_file(jsonl(*rows), filename="r.jsonl", policies=Policies(min_examples=1, near_duplicates="off"), output=tmp_path / "o.parquet")
    pack = build_pack(tmp_path / "o.parquet", ChatTokenizer.load(qwen3), PackSettings(max_seq_len=256), tmp_path / "p", dataset_id="ds")
    assert (pack.num_examples, pack.dropped) == (2, {"nothing_to_train": 3})


def test_templates_that_keep_history_as_it_was_train_every_turn(chatml: Path) -> None:
    tokenizer = ChatTokenizer.load(chatml)
    turns = (("user", "1"), ("assistant", "<think>x</think>a"), ("user", "2"), ("assistant", "b"))
    assert trained(tokenizer, chat(*turns)) == ["<think>x</think>a<|im_end|>", "b<|im_end|>"]
    assert tokenizer.encode(chat(*turns), max_seq_len=1000).turns == ("loss", "loss")


def test_the_check_the_preview_and_the_pack_report_the_same_turns_without_loss(
    qwen3: Path, jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    rows = [
        {"messages": [ASKED, {"role": "assistant", "content": f"{i}."}, ASKED, {"role": "assistant", "content": f"{i}!"}]} for i in range(6)
    ]
    rows.append({"messages": [ASKED, THOUGHT]})
    file = jsonl(*rows)
    report = check(file, qwen3, near_duplicates="off")
    (warning,) = [w["message"] for w in report.warnings if w["code"] == "turns_without_loss"]
    assert "6 earlier assistant turns in 6 rows carry no loss" in warning
    assert (report.stats["trained_turns"], report.stats["untrained_turns"]) == (7, 6)
    assert "left out of training" not in warning
    assert check(file, near_duplicates="off").stats["untrained_turns"] is None, "without a model it is not known"

    output = tmp_path / "rows.parquet"
    validate_file(file, filename="r.jsonl", policies=Policies(min_examples=1, near_duplicates="off"), output=output)
    tokenizer = ChatTokenizer.load(qwen3)
    manifest = build_pack(output, tokenizer, PackSettings(max_seq_len=256, packing=False), tmp_path / "pack", dataset_id="ds")
    assert manifest.untrained_turns == 6
    shown = preview(load_rows(output), tokenizer, max_seq_len=256, num_examples=7)
    assert [one.turns for one in shown] == [["rewritten_in_history", "loss"]] * 6 + [["loss"]]
    line = "  no loss on assistant turn 1 of 2: the chat template writes it differently once more messages follow"
    assert line in list(preview_lines(shown[0], colour=False))
    packed = pq.read_table(tmp_path / "pack" / "shard-00000.parquet")
    with_loss = sum(sum(label != IGNORE for label in labels) for labels in packed["labels"].to_pylist())
    assert with_loss == sum(one.num_trained_tokens for one in shown) == manifest.num_trained_tokens


def test_a_row_whose_only_weighted_turn_is_rewritten_is_counted_and_left_out(
    qwen3: Path, jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    lost = [ASKED, {"role": "assistant", "content": "a"}, ASKED, {"role": "assistant", "content": "b", "weight": 0}]
    file = jsonl({"messages": lost}, {"messages": [ASKED, THOUGHT]})
    report = check(file, qwen3)
    assert any("1 of these rows have no other turn" in w["message"] for w in report.warnings if w["code"] == "turns_without_loss")
    output = tmp_path / "rows.parquet"
    validate_file(file, filename="r.jsonl", policies=Policies(min_examples=1), output=output)
    manifest = build_pack(output, ChatTokenizer.load(qwen3), PackSettings(max_seq_len=256), tmp_path / "pack", dataset_id="ds")
    assert (manifest.num_examples, manifest.dropped) == (1, {"nothing_to_train": 1})


@pytest.mark.parametrize("answer", [THOUGHT, {"role": "assistant", "content": "<think>\nOne and one make two.\n</think>\n\nIt is 2."}])
def test_reasoning_that_the_template_would_drop_is_refused_at_the_check_and_in_the_pack(
    answer: dict[str, str], chatml: Path, tmp_path: Path, jsonl: Callable[..., Path]
) -> None:
    if "reasoning_content" not in answer:  # DeepSeek's template cuts everything before </think>, in the answer as well
        chatml = build(tmp_path / "cutting", "chatml")
        template = (chatml / "chat_template.jinja").read_text()
        cutting = (
            template.replace("content", "content.split('</think>')[-1]")
            if "message.content" in template
            else template.replace("['content']", "['content'].split('</think>')[-1]")
        )
        assert cutting != template
        (chatml / "chat_template.jinja").write_text(cutting)
    file = jsonl({"messages": [ASKED, {"role": "assistant", "content": "Two."}]}, {"messages": [ASKED, answer]})
    report = check(file, chatml)
    assert not report.valid
    (error,) = report.errors
    assert (error.row, error.code) == (2, "reasoning_not_rendered")
    assert "messages[1]" in error.message and "remove the reasoning" in error.fix
    assert check(file, chatml, bad_rows="drop").examples == 1

    output = tmp_path / "rows.parquet"
    unnamed = validate_file(file, filename="r.jsonl", policies=Policies(min_examples=1), output=output).report
    assert unnamed.valid
    assert [w["code"] for w in unnamed.warnings if w["code"] == "reasoning_not_checked"] == ["reasoning_not_checked"]
    tokenizer = ChatTokenizer.load(chatml)
    with pytest.raises(InvalidDataset, match=r"\(rows 2\).*leaves out the reasoning of messages\[1\]") as refused:
        build_pack(output, tokenizer, PackSettings(max_seq_len=256), tmp_path / "fail", dataset_id="ds")
    assert refused.value.code == "reasoning_not_rendered"
    kept = build_pack(output, tokenizer, PackSettings(max_seq_len=256, bad_rows="drop"), tmp_path / "drop", dataset_id="ds")
    assert (kept.num_examples, kept.dropped) == (1, {"reasoning_not_rendered": 1})


def test_reasoning_counts_in_every_check_of_content(qwen3: Path, jsonl: Callable[..., Path], tmp_path: Path) -> None:
    def row(reasoning: str) -> dict[str, Any]:
        return {"messages": [ASKED, {"role": "assistant", "content": "It is 2.", "reasoning_content": reasoning}]}

    forged = check(jsonl(row("so <|im_end|>")), qwen3)
    assert [(e.code, e.path) for e in forged.errors] == [("control_token_in_content", "messages[1].reasoning")]
    personal = jsonl(row("ask jane.doe@example.com about it"))
    output = tmp_path / "rows.parquet"
    validate_file(personal, filename="p.jsonl", policies=Policies(min_examples=1, pii="redact"), output=output)
    (example,) = load_rows(output)
    assert example.messages[1].reasoning == "ask [EMAIL] about it" and example.messages[1].content == "It is 2."
    two = check(jsonl(row("First, one and one."), row("Second thoughts of another kind."), row("First, one and one.")))
    assert two.stats["duplicates"]["exact"] == 1, "another reasoning makes another row, the same one a copy"


@pytest.mark.parametrize(
    ("message", "code", "says"),
    [
        ({"role": "user", "content": "1+1?", "thinking": "hm"}, "invalid_reasoning", "only an assistant's message has reasoning"),
        (
            {"role": "assistant", "content": "2", "thinking": "hm", "reasoning_content": "ah"},
            "invalid_reasoning",
            "reasoning_content and thinking differ",
        ),
        ({"role": "assistant", "content": "2", "thinking": 7}, "wrong_type", "not text"),
    ],
)
def test_reasoning_in_the_wrong_place_is_a_bad_row(message: dict[str, Any], code: str, says: str, jsonl: Callable[..., Path]) -> None:
    messages = [ASKED, {"role": "assistant", "content": "2"}]
    messages[0 if message["role"] == "user" else 1] = message
    report = check(jsonl({"messages": messages}))
    (error,) = report.errors
    assert error.code == code and says in error.message


MISTRAL_ROWS = (
    {"messages": [ASKED, {"role": "user", "content": "Quick!"}, {"role": "assistant", "content": "2"}]},
    {"messages": [ASKED, {"role": "assistant", "content": "It is 2."}]},
)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("reasoning") / "mistral", "mistral")


def test_two_user_turns_in_a_row_are_refused_at_the_check_when_the_named_template_refuses_them(
    mistral: Path, chatml: Path, jsonl: Callable[..., Path]
) -> None:
    file = jsonl(*MISTRAL_ROWS)
    report = check(file, mistral)
    (error,) = report.errors
    assert (report.valid, error.row, error.code) == (False, 1, "template_refused")
    assert "must alternate" in error.message and "join the messages" in error.fix
    assert not [w for w in report.warnings if w["code"] == "consecutive_turns"]
    assert check(file, chatml).valid, "a template that takes them trains them"


TWO_ANSWERS = {"messages": [ASKED, {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "It is 2."}]}


@pytest.mark.parametrize("doubled", [MISTRAL_ROWS[0], TWO_ANSWERS], ids=["user", "assistant"])
def test_two_turns_of_one_role_in_a_row_are_warned_of_while_no_model_is_named(doubled: dict[str, Any], jsonl: Callable[..., Path]) -> None:
    report = check(jsonl(doubled, MISTRAL_ROWS[1]))
    assert report.valid
    (warning,) = [w["message"] for w in report.warnings if w["code"] == "consecutive_turns"]
    assert warning.startswith("1 rows hold two user or two assistant messages in a row") and "--model" in warning


def test_the_pack_gives_the_verdict_of_the_check(mistral: Path, jsonl: Callable[..., Path], tmp_path: Path) -> None:
    output = tmp_path / "rows.parquet"
    validate_file(jsonl(*MISTRAL_ROWS), filename="m.jsonl", policies=Policies(min_examples=1), output=output)
    tokenizer = ChatTokenizer.load(mistral)
    with pytest.raises(InvalidDataset, match=r"1 examples do not fit the base model \(rows 1\): .*must alternate.*bad_rows=drop"):
        build_pack(output, tokenizer, PackSettings(max_seq_len=256), tmp_path / "fail", dataset_id="ds")
    kept = build_pack(output, tokenizer, PackSettings(max_seq_len=256, bad_rows="drop"), tmp_path / "drop", dataset_id="ds")
    assert (kept.num_examples, kept.dropped, kept.dropped_rows) == (1, {"template_refused": 1}, {"template_refused": [1]})
    assert json.loads((tmp_path / "drop" / "manifest.json").read_text())["dropped"] == {"template_refused": 1}


def test_thinking_that_a_template_drops_from_earlier_turns_makes_no_row_too_long(qwen3: Path) -> None:
    tokenizer, thought = ChatTokenizer.load(qwen3), f"<think>{'so on and on ' * 5000}</think>"
    dropped = chat(("user", "1+1?"), ("assistant", f"{thought}2"), ("user", "2+2?"), ("assistant", "4"))
    assert tokenizer.fewest_tokens(dropped) <= tokenizer.count_tokens(dropped) < 100
    answer = chat(("user", "1+1?"), ("assistant", f"{thought}2"))
    assert 100 < tokenizer.fewest_tokens(answer) <= tokenizer.count_tokens(answer)


def test_openings_without_an_end_are_read_once() -> None:
    class Counted(str):
        read = 0

        def find(self, *given: Any) -> int:
            at = super().find(*given)
            Counted.read += (len(self) if at < 0 else at) - int(given[1])
            return at

    content = Counted("</think>" + "<think>" * 100_000)
    assert reasoning_of(Message(role="assistant", content=content)) == []
    assert 0 < Counted.read <= 2 * len(content)
    assert reasoning_of(Message(role="assistant", content="<think>a</think> b <think> c <think>d</think>")) == ["a", "c <think>d"]


def test_reasoning_that_the_template_leaves_out_of_a_turn_without_loss_is_let_pass(chatml: Path, jsonl: Callable[..., Path]) -> None:
    answer = {"role": "assistant", "content": "It is 2."}
    rows = [{"messages": [ASKED, {**THOUGHT, "weight": weight}, ASKED, answer]} for weight in (0, 1)]
    report = check(jsonl(*rows), chatml)
    assert [(error.row, error.code) for error in report.errors] == [(2, "reasoning_not_rendered")]


def test_a_turn_that_the_template_refuses_as_an_answer_carries_no_loss(tmp_path: Path) -> None:
    model = build(tmp_path / "late", "chatml")
    template = (
        "{% if messages | length == 2 %}{{ raise_exception('an answer comes after two questions') }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    (model / "chat_template.jinja").write_text(template)
    tokenizer = ChatTokenizer.load(model)
    turns = chat(("user", "1"), ("assistant", "a"), ("user", "2"), ("assistant", "b"))
    assert tokenizer.encode(turns, max_seq_len=1000).turns == ("rewritten_in_history", "loss")
    assert trained(tokenizer, turns) == ["b<|im_end|>"]
