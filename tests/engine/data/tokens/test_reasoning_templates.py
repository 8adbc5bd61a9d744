"""What a template does with reasoning is found by rendering samples: its field, its loss, its marks, and answers that begin in two ways."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer, normalizers

from core.errors import InvalidDataset
from engine.data.identity import content_hash
from engine.data.ingest import Policies, load_rows, validate_file
from engine.data.packs.build import PackSettings, build_pack, build_preference_pack
from engine.data.row_preview import preview, preview_lines, preview_pieces
from engine.data.schema import Example, Message, canonical, parse_canonical
from engine.data.shapes import to_example
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.data.tokens.loss_mask import IGNORE
from engine.data.tokens.reasoning_probe import SIDES, Opening, Side, TemplateOpenings, ThinkingSwitch, ThinkMarks
from tests.engine.data.tokens.test_templates import build
from tests.support.models.reasoning_templates import TEMPLATES

Load = Callable[[str], Path]
ASKED = {"role": "user", "content": "How much is 1+1?"}
ENABLE_THINKING = ThinkingSwitch(name="enable_thinking", value=False, side="without_reasoning")
EFFORT = ThinkingSwitch(name="reasoning_effort", value="low", side="without_reasoning")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Load:
    root = tmp_path_factory.mktemp("templates")

    def made(name: str) -> Path:
        if not (root / name).is_dir():
            build(root / name, "chatml")
            (root / name / "chat_template.jinja").write_text(TEMPLATES[name])
        return root / name

    return made


def thought(content: str, reasoning: str | None) -> Message:
    return Message(role="assistant", content=content, reasoning=reasoning)


def chat(*answers: Message, **kwargs: Any) -> Example:
    messages = [m for number, answer in enumerate(answers) for m in (Message(role="user", content=f"{number}?"), answer)]
    return Example(kind="chat", messages=tuple(messages), row=1, template_kwargs=kwargs)


def trained(tokenizer: ChatTokenizer, example: Example) -> list[str]:
    labels = tokenizer.encode(example, max_seq_len=10**6).labels
    edges = np.flatnonzero(np.diff(np.concatenate(([0], labels != IGNORE, [0])))).reshape(-1, 2)
    return [tokenizer.decode(labels[start:end].tolist()) for start, end in edges.tolist()]


def check(path: Path, model: Path | None = None) -> Any:
    policies = Policies(min_examples=1, near_duplicates="off")
    return validate_file(
        path, filename="r.jsonl", policies=policies, model_dir=model, max_seq_len=4096 if model else None, output=path.with_suffix(".out")
    ).report


def warned(report: Any) -> dict[str, str]:
    return {w["code"]: w["message"] for w in report.warnings}


FACTS = {
    "switched": ("reasoning_content", True, "last_turn", ENABLE_THINKING, ThinkMarks()),
    "opened": ("reasoning_content", True, "last_turn", None, ThinkMarks(before="", after="</think>")),
    "one line": ("reasoning_content", True, "last_turn", None, ThinkMarks(before="", after="</think>")),
    "stripped": (None, False, "all_turns", None, ThinkMarks()),
    "kept": ("reasoning_content", True, "all_turns", None, ThinkMarks()),
    "channels": ("thinking", True, "last_turn", EFFORT, ThinkMarks(before="/analysis", after="assistant/final", plain="/final")),
}


@pytest.mark.parametrize("name", FACTS)
def test_a_templates_reasoning_is_found_by_rendering_samples(model: Load, name: str) -> None:
    found = ChatTokenizer.load(model(name)).reasoning
    assert found is not None
    facts = found.facts
    assert (facts.field, facts.in_content, facts.loss, facts.switch, found.marks) == FACTS[name]


def test_a_template_that_refuses_a_variable_or_every_sample_has_no_switch(tmp_path: Path) -> None:
    model = build(tmp_path / "strict", "chatml")
    refuses = "{% if reasoning_effort is defined and reasoning_effort != 'high' %}{{ raise_exception('high or nothing') }}{% endif %}"
    (model / "chat_template.jinja").write_text(refuses + TEMPLATES["kept"])
    strict = ChatTokenizer.load(model).reasoning
    assert strict is not None and (strict.facts.field, strict.facts.switch) == ("reasoning_content", None)
    (model / "chat_template.jinja").write_text("{{ raise_exception('never') }}")
    never = ChatTokenizer.load(model).reasoning
    assert never is not None and (never.facts.field, never.facts.loss, never.facts.switch) == (None, "last_turn", None)
    assert never.marks == ThinkMarks()


@pytest.mark.parametrize("name", ["switched", "opened", "one line", "kept", "channels"])
@pytest.mark.parametrize("kinds", [(True, True), (False, True), (True, False), (False, False)])
def test_what_carries_loss_is_what_inference_would_generate(model: Load, name: str, kinds: tuple[bool, bool]) -> None:
    """Before each run of loss stands exactly the generation prompt of the conversation so far, in the form that inference gives it."""
    tokenizer = ChatTokenizer.load(model(name))
    example = chat(*(thought(f"answer {n}", f"because {n}" if kind else None) for n, kind in enumerate(kinds)))
    encoded = tokenizer.encode(example, max_seq_len=10**6)
    runs = trained(tokenizer, example)
    turns = [number for number, turn in enumerate(encoded.turns) if turn == "loss"]
    history_unchanged = name == "kept" or (name in ("opened", "one line") and not kinds[0])
    assert turns == ([0, 1] if history_unchanged else [1])
    for number, run in zip(turns, runs, strict=True):
        prompt = tokenizer.decode(tokenizer.render_turns([m.as_template() for m in example.messages[: 2 * number + 1]]))
        if name in ("opened", "one line") and not kinds[number]:
            assert run == f"answer {number}<|im_end|>", "and the check warns that the prompt says otherwise"
            continue
        assert f"{prompt}{run}" == encoded.text[: len(prompt) + len(run)]
        assert (f"because {number}" in run) == kinds[number]


def test_a_row_may_turn_thinking_off_so_that_the_empty_block_belongs_to_the_prompt(model: Load) -> None:
    tokenizer = ChatTokenizer.load(model("switched"))
    answer = thought("It is 2.", None)
    assert trained(tokenizer, chat(answer)) == ["<think>\n\n</think>\n\nIt is 2.<|im_end|>"]
    off = chat(answer, enable_thinking=False)
    assert trained(tokenizer, off) == ["It is 2.<|im_end|>"]
    assert tokenizer.encode(off, max_seq_len=1000).text == tokenizer.encode(chat(answer), max_seq_len=1000).text
    assert trained(tokenizer, chat(answer, enable_thinking=True)) == trained(tokenizer, chat(answer))
    (side, _) = tokenizer.encode_preference(
        Example(
            kind="preference",
            messages=(Message(role="user", content="?"),),
            chosen=(answer,),
            rejected=(thought("3", None),),
            template_kwargs={"enable_thinking": False},
        ),
        max_seq_len=1000,
    )
    assert tokenizer.decode([t for t in side.labels.tolist() if t != IGNORE]) == "It is 2.<|im_end|>"


def rows(*, thinking: int, plain: int, **fields: Any) -> list[dict[str, Any]]:
    """`fields` are those of the rows without reasoning."""
    made = [
        {"messages": [ASKED, {"role": "assistant", "content": f"{n}.", "reasoning_content": f"One and one, {n}."}]} for n in range(thinking)
    ]
    return made + [{"messages": [ASKED, {"role": "assistant", "content": f"{n}!"}], **fields} for n in range(plain)]


MIXED = {
    "switched": ({"enable_thinking": False}, 'give the rows without reasoning "enable_thinking": false'),
    "kept": (None, "give all rows reasoning, or none"),
    "channels": (
        {"chat_template_kwargs": {"reasoning_effort": "low"}},
        'give the rows without reasoning "chat_template_kwargs": {"reasoning_effort": "low"}',
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_two_openings_for_one_prompt_are_warned_of_with_counts_and_the_fix_that_ends_them(
    model: Load, jsonl: Callable[..., Path], name: str
) -> None:
    fix, advice = MIXED[name]
    report = check(jsonl(*rows(thinking=3, plain=2)), model(name))
    assert warned(report)["mixed_reasoning"] == (
        "3 answers with reasoning and 2 without follow the same generation prompt: the model would learn two openings for one prompt; "
        + advice
    )
    assert report.stats["reasoning"]["openings"] == [{"template_kwargs": {}, "with_reasoning": 3, "without_reasoning": 2, "unprompted": 0}]
    assert report.stats["reasoning"]["rows"] == 3
    for alike in (rows(thinking=3, plain=0), rows(thinking=0, plain=2), *([rows(thinking=3, plain=2, **fix)] if fix else [])):
        after = check(jsonl(*alike), model(name))
        assert after.valid and not {"mixed_reasoning", "generation_prompt_not_trained", "unknown_field"} & set(warned(after))


def test_answers_that_do_not_continue_what_the_prompt_opens_are_warned_of(model: Load, jsonl: Callable[..., Path]) -> None:
    report = check(jsonl(*rows(thinking=3, plain=2)), model("opened"))
    assert {"mixed_reasoning", "generation_prompt_not_trained"} <= set(warned(report))
    assert warned(report)["generation_prompt_not_trained"].startswith("2 answers do not continue the generation prompt of the base model's")
    contradictory = [{**row, "enable_thinking": False} for row in rows(thinking=4, plain=0)]
    found = warned(check(jsonl(*contradictory), model("switched")))
    assert found["generation_prompt_not_trained"].startswith(
        '4 answers do not continue the generation prompt under {"enable_thinking": false}'
    )


def test_reasoning_that_a_template_never_renders_is_a_bad_row_with_its_fix(model: Load, jsonl: Callable[..., Path]) -> None:
    report = check(jsonl(*rows(thinking=3, plain=2)), model("stripped"))
    (problem,) = report.problems
    assert (report.valid, problem.code, problem.count) == (False, "reasoning_not_rendered", 3)
    assert "choose a base model whose chat template renders it" in problem.fix
    assert report.stats["reasoning"]["template"]["field"] is None


def test_reasoning_of_earlier_turns_that_the_template_leaves_out_is_counted(model: Load, jsonl: Callable[..., Path]) -> None:
    answer = {"role": "assistant", "content": "2", "reasoning_content": "One and one."}
    file = jsonl(*({"messages": [ASKED, answer, ASKED, {**answer, "content": f"{n}"}]} for n in range(4)))
    report = check(file, model("switched"))
    assert warned(report)["reasoning_left_out"].startswith("4 assistant turns without loss in 4 rows hold reasoning")
    assert report.stats["reasoning"]["left_out_turns"] == 4 and report.stats["untrained_turns"] == 4
    kept = check(file, model("kept"))
    assert "reasoning_left_out" not in warned(kept) and kept.stats["reasoning"]["template"]["loss"] == "all_turns"
    unknown = check(file)
    assert unknown.stats["reasoning"] == {"rows": 4, "left_out_turns": 0, "template": None, "openings": []}
    assert "4 rows hold reasoning" in warned(unknown)["reasoning_not_checked"]


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"enable_thinking": "true"}, {"enable_thinking": True}),
        ({"chat_template_kwargs": {"thinking": True, "unset": None}}, {"thinking": True}),
        ({"chat_template_kwargs": '{"reasoning_effort": "low"}', "enable_thinking": None}, {"reasoning_effort": "low"}),
        ({"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": False}, {"enable_thinking": False}),
        ({"chat_template_kwargs": ""}, {}),
    ],
)
def test_a_rows_variables_reach_its_example_and_its_identity(fields: dict[str, Any], kwargs: dict[str, Any]) -> None:
    messages = [ASKED, {"role": "assistant", "content": "2"}]
    example, problems = to_example({"messages": messages, **fields}, "chat", row=3)
    assert (problems, example and example.template_kwargs) == ([], kwargs)
    assert example is not None and parse_canonical(canonical(example), row=3) == example
    plain, _ = to_example({"messages": messages}, "chat", row=3)
    assert plain is not None and b"template_kwargs" not in canonical(plain)
    assert (content_hash(plain) == content_hash(example)) == (not kwargs)
    judged, _ = to_example({"prompt": "a", "completion": "b", "label": True, **fields}, "kto", row=3)
    assert judged is not None and (judged.kind, judged.label, judged.template_kwargs) == ("kto", True, kwargs)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"enable_thinking": "perhaps"}, "enable_thinking is not true or false"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "or chat_template_kwargs differs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs is a list, not an object"),
        ({"chat_template_kwargs": {"messages": "x"}}, "'messages' is not a variable that a row may set"),
        ({"chat_template_kwargs": {"eos_token": "x"}}, "'eos_token' is not a variable that a row may set"),
        ({"chat_template_kwargs": {"style": "<|im_end|>"}}, "the value is text of another form"),
        ({"chat_template_kwargs": {"style": {"a": 1}}}, "the value is an object of another form"),
        ({"chat_template_kwargs": {"x": 10**400}}, "the value is a number of another form"),
        ({"chat_template_kwargs": {"x": 1 << 63}}, "the value is a number of another form"),
        ({"chat_template_kwargs": {"x": float("inf")}}, "the value is a number of another form"),
        ({"chat_template_kwargs": '{"enable_thinking": fals}'}, "the text of chat_template_kwargs: Expecting value"),
        ({"chat_template_kwargs": {f"v{n}": n for n in range(17)}}, "17 variables, more than 16"),
    ],
)
def test_variables_that_a_template_must_not_be_given_are_bad_rows(fields: dict[str, Any], says: str) -> None:
    example, problems = to_example({"messages": [ASKED, {"role": "assistant", "content": "2"}], **fields}, "chat", row=3)
    assert example is None
    assert [(p.code, says in p.message) for p in problems] == [("invalid_template_kwargs", True)]


@pytest.mark.parametrize("name", ["switched", "opened", "one line", "kept", "channels"])
def test_a_preview_shows_which_tokens_are_reasoning(model: Load, name: str) -> None:
    tokenizer, reasoning = ChatTokenizer.load(model(name)), "Une \u00e9t\u00e9, one and one;\nthat makes two."
    example = chat(thought("1", "first, of all"), thought("It is 2.", reasoning))
    (shown,) = preview([example], tokenizer, max_seq_len=1000)
    assert [s.text for s in shown.reasoning_spans] == (["first, of all"] if name == "kept" else []) + [reasoning]
    for span in shown.reasoning_spans:
        assert shown.text[span.start_char : span.end_char] == span.text
        assert span.text in tokenizer.decode(shown.input_ids[span.start : span.end])
        assert span.text not in tokenizer.decode(shown.input_ids[span.start + 1 : span.end])
        assert span.text not in tokenizer.decode(shown.input_ids[span.start : span.end - 1])
    assert shown.num_reasoning_tokens == sum(s.end - s.start for s in shown.reasoning_spans)
    assert all(loss for text, loss, is_reasoning in preview_pieces(shown) if is_reasoning)
    assert "".join(text for text, _, _ in preview_pieces(shown)) == shown.text
    lines = "\n".join(preview_lines(shown, colour=False))
    assert f"{{?{reasoning}?}}" in lines and lines.count("{+") == lines.count("+}") == len(shown.loss_spans)
    last = shown.reasoning_spans[-1]
    (cut,) = preview([example], tokenizer, max_seq_len=last.start + 4)
    assert (cut.truncated, cut.reasoning_spans[-1].end) == (True, last.start + 4)
    assert reasoning.startswith(cut.reasoning_spans[-1].text)
    assert "".join(text for text, _, _ in preview_pieces(cut)) == cut.text[: cut.kept_chars]


def opening(kwargs: str, side: Side, **more: Any) -> Opening:
    return Opening(kwargs=kwargs, side=side, prompted=True, **more)


def test_any_number_of_variables_makes_a_bounded_count_and_one_warning() -> None:
    openings = TemplateOpenings()
    for n in range(500):
        for side in SIDES:
            openings.add(opening(json.dumps({"seed": n}), side))
    merged = TemplateOpenings()
    merged.merge(openings)
    assert len(openings.counts) == len(merged.counts) == 51 and merged.counts == openings.counts
    assert sum(group["with_reasoning"] for group in merged.listed()) == 500
    ((code, message),) = merged.warnings(None)
    assert (code, len(message) < 400) == ("mixed_reasoning", True)
    assert message.startswith("50 answers with reasoning and 50 without") and "and 47 more sets of variables" in message


def test_rows_that_safety_share_mixes_in_are_warned_of_with_a_fix_that_the_tenant_can_apply(model: Load) -> None:
    reasoning = ChatTokenizer.load(model("switched")).reasoning
    assert reasoning is not None
    openings = TemplateOpenings()
    for example in (chat(thought("2", "hm")), replace(chat(thought("No.", None)), row=-1)):
        openings.add(reasoning.opening(example))
    assert openings.counts == {"{}": {"with_reasoning": 1, "without_reasoning": 0, "unprompted": 0, "mixed_in": 1}}
    ((code, message),) = openings.warnings(ENABLE_THINKING)
    assert code == "mixed_reasoning" and "as 1 without that safety_share mixes in" in message and "enable_thinking" not in message


@pytest.mark.parametrize(
    ("content", "side"),
    [
        (" <think>hm</think>2", "with_reasoning"),
        ("Write <think>hm</think> first.", "without_reasoning"),
        ("<think></think>2", "without_reasoning"),
        ("<think> and no end", "without_reasoning"),
    ],
)
def test_reasoning_stands_in_front_of_the_answer(model: Load, content: str, side: str) -> None:
    reasoning = ChatTokenizer.load(model("kept")).reasoning
    assert reasoning is not None
    found = reasoning.opening(chat(thought(content, None)))
    assert found is not None and found.side == side


def test_equal_reasoning_is_shown_at_each_of_its_places(model: Load) -> None:
    (shown,) = preview([chat(thought("<think>hm</think> 2 <think>hm</think>", "hm"))], ChatTokenizer.load(model("kept")), max_seq_len=1000)
    places = [span.start_char for span in shown.reasoning_spans]
    assert len(set(places)) == 3 and places == sorted(places)


def test_an_answer_labeled_bad_is_not_taught(model: Load) -> None:
    reasoning = ChatTokenizer.load(model("switched")).reasoning
    assert reasoning is not None
    judged = [replace(chat(thought("2", None)), kind="kto", label=label) for label in (True, False)]
    assert [reasoning.opening(example) is None for example in judged] == [False, True]


class CountingTokenizer(ChatTokenizer):
    num_decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        self.num_decoded += len(ids)
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


def test_rows_that_differ_in_how_their_answers_begin_are_no_near_duplicates_but_stay_in_one_part(jsonl: Callable[..., Path]) -> None:
    long = "One and one make two, as anyone who has counted on their fingers knows. " * 3
    plain = [{"messages": [ASKED, {"role": "assistant", "content": f"{long}{n}"}]} for n in range(3)]
    thinking = [{"messages": [ASKED, {"role": "assistant", "content": f"{long}{n}", "reasoning_content": "Hm."}]} for n in range(3)]
    file = jsonl(*plain, *({**row, "enable_thinking": False} for row in plain), *thinking)
    report = validate_file(file, filename="r.jsonl", policies=Policies(min_examples=1), output=file.with_suffix(".out")).report
    assert report.stats["duplicates"]["near"] == 6
    kept = pq.read_table(file.with_suffix(".out")).to_pydict()
    assert kept["row"] == [1, 4, 7] and len(set(kept["split_key"])) == 1


def test_a_preview_of_many_spans_does_not_decode_the_row_for_each(model: Load) -> None:
    tokenizer = CountingTokenizer.load(model("kept"))
    spans = 10_000
    (shown,) = preview([chat(thought("".join(f"<think>\u00e9{n}</think>" for n in range(spans)), "hm"))], tokenizer, max_seq_len=10**6)
    assert len(shown.reasoning_spans) == spans + 1
    assert 0 < tokenizer.num_decoded <= 2 * len(shown.input_ids)
    assert [shown.text[s.start_char : s.end_char] for s in shown.reasoning_spans[1:]] == [f"\u00e9{n}" for n in range(spans)]
    assert sum(is_reasoning for _, _, is_reasoning in preview_pieces(shown)) == spans + 1


def test_reasoning_is_shown_where_normalization_changes_the_text(model: Load) -> None:
    directory = model("kept")
    changed = Tokenizer.from_file(str(directory / "tokenizer.json"))
    changed.normalizer = normalizers.NFC()
    tokenizer = ChatTokenizer(changed, template=TEMPLATES["kept"], config={"eos_token": "<|im_end|>"}, digests=("", ""))
    (shown,) = preview([chat(thought("It is 2, e\u0301.", "because e\u0301 is so"))], tokenizer, max_seq_len=1000)
    (span,) = shown.reasoning_spans
    assert span.text == "because e\u0301 is so" == shown.text[span.start_char : span.end_char]
    assert tokenizer.decode(shown.input_ids[span.start : span.end]).strip() == "because \u00e9 is so"


def test_a_preview_without_reasoning_has_none(model: Load) -> None:
    (shown,) = preview([chat(thought("2", None))], ChatTokenizer.load(model("switched")), max_seq_len=1000)
    assert (shown.reasoning_spans, shown.num_reasoning_tokens) == ((), 0)
    assert [loss for _, loss, _ in preview_pieces(shown)] == [False, True, False]


def test_a_pack_counts_how_its_answers_begin(model: Load, jsonl: Callable[..., Path], tmp_path: Path) -> None:
    file = jsonl(*rows(thinking=3, plain=4), *rows(thinking=0, plain=5, enable_thinking=False))
    validate_file(file, filename="r.jsonl", policies=Policies(min_examples=1, near_duplicates="off"), output=tmp_path / "o.parquet")
    tokenizer = ChatTokenizer.load(model("switched"))
    pack = build_pack(tmp_path / "o.parquet", tokenizer, PackSettings(max_seq_len=256), tmp_path / "p", dataset_id="ds")
    assert pack.openings == {
        "{}": {"with_reasoning": 3, "without_reasoning": 4, "unprompted": 0},
        '{"enable_thinking": false}': {"with_reasoning": 0, "without_reasoning": 5, "unprompted": 0},
    }
    ((code, message),) = TemplateOpenings(counts=pack.openings).warnings(ENABLE_THINKING)
    assert code == "mixed_reasoning" and message.startswith("3 answers with reasoning and 4 without")
    pairs = [
        Example(
            kind="preference", messages=(Message(role="user", content="?"),), chosen=(thought("a", "hm"),), rejected=(thought("b", None),)
        )
    ]
    assert build_preference_pack(pairs, tokenizer, PackSettings(max_seq_len=256), tmp_path / "d", dataset_id="ds").openings == {
        "{}": {"with_reasoning": 1, "without_reasoning": 0, "unprompted": 0}
    }


def test_rows_with_variables_are_filled_by_pattern_with_the_ids_of_the_template(model: Load, jsonl: Callable[..., Path]) -> None:
    directory = model("switched")
    fast, slow = ChatTokenizer.load(directory), ChatTokenizer.load(directory)
    slow._patterns._template.__dict__["can_be_watched"] = False
    for kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True}, {"enable_thinking": 0}):
        example = chat(thought("a b", None), thought(" c\n", None), **kwargs)
        one, other = fast.encode(example, max_seq_len=1000), slow.encode(example, max_seq_len=1000)
        assert (one.text, one.input_ids.tolist(), one.labels.tolist()) == (other.text, other.input_ids.tolist(), other.labels.tolist())
    file = jsonl(*rows(thinking=0, plain=2, enable_thinking=False))
    check(file)
    assert [e.template_kwargs for e in load_rows(file.with_suffix(".out"))] == [{"enable_thinking": False}] * 2


@pytest.mark.parametrize(
    ("marks", "text", "split"),
    [
        (ThinkMarks(), "<think>\nhm\n</think>\n\n2", ("hm", "2")),
        (ThinkMarks(), "so it is\n</think>\n\n2", ("so it is", "2")),
        (ThinkMarks(), "write </think> to end it", ("", "write </think> to end it")),
        (ThinkMarks(), "<think> and no end", ("", "<think> and no end")),
        (ThinkMarks(before=""), "so it is\n</think>\n\n2", ("so it is", "2")),
        (ThinkMarks(before=""), "17 and 25 make 42.</think>It is 42.", ("17 and 25 make 42.", "It is 42.")),
        (ThinkMarks(before=""), "</think>It is 42.", ("", "It is 42.")),
        (ThinkMarks(before=""), "<think>hm</think>2", ("hm", "2")),
        (ThinkMarks(before=""), "so it has no end", ("", "so it has no end")),
        (FACTS["channels"][4], "/analysis\nhmassistant/final\n2", ("hm", "2")),
        (FACTS["channels"][4], "/final\n2", ("", "\n2")),
        (FACTS["channels"][4], "<think>hm</think>2", ("hm", "2")),
        (FACTS["channels"][4], "/analysis without an end", ("", "/analysis without an end")),
    ],
)
def test_reasoning_is_split_off_by_the_marks_of_the_template(marks: ThinkMarks, text: str, split: tuple[str, str]) -> None:
    assert marks.split(text) == split
    assert marks.is_unfinished(text) == text.endswith(("no end", "an end"))
    reasoning, answer = split
    assert marks.split(marks.join(reasoning, answer.strip())) == (reasoning, answer.strip())


def test_a_row_of_another_template_is_refused_as_before(model: Load) -> None:
    with pytest.raises(InvalidDataset, match=r"leaves out the reasoning of messages\[1\]"):
        ChatTokenizer.load(model("stripped")).encode(chat(thought("2", "hm")), max_seq_len=100)
    assert json.loads(canonical(chat(thought("2", "hm"), enable_thinking=True)))["template_kwargs"] == {"enable_thinking": True}
