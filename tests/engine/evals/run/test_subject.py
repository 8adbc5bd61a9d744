"""What a subject answers, against plain transformers one text at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from core.errors import InvalidRequest
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.evals.suites.model_requests import Answer, Generate, Likelihood, Loss, Request

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # PEFT uses old names of transformers
FEW_SHOT = "".join(f"Question {i}: what is {i}? Answer: {i}.\n" for i in range(6))
"""Longer than ``sharing.MIN_PREFIX`` tokens: one a byte."""


@pytest.fixture(scope="module")
def subject(place: Path) -> Any:
    from engine.evals.run.subject import Subject

    found = Subject(place / "base", batch_size=4)
    found.add("adapter", place / "adapter")
    return found


def questions() -> list[Likelihood]:
    """Multiple choice behind examples, of one context alone, without a context, too long, one with another as its beginning."""
    asked = [
        Likelihood(id=f"q{q}/{c}", context=f"{FEW_SHOT}Question: what then is {q * q}? Answer:", continuation=f" {'abcd'[c] * (c + 1)}")
        for q in range(7)
        for c in range(4)
    ]
    asked += [Likelihood(id=f"letters/{c}", context="hello ", continuation=c) for c in "ab"]
    asked += [Likelihood(id=f"longer/{c}", context="say", continuation=c) for c in (" no", " no way", " not")]
    asked.append(Likelihood(id="bare", context="", continuation="xyz"))
    asked.append(Likelihood(id="long", context="z" * 700, continuation=" yes"))
    asked.append(Likelihood(id="twice", context="hello ", continuation="a"))
    return asked


def answered(batches: Iterator[dict[str, Answer]]) -> dict[str, Any]:
    return {id_: answer for batch in batches for id_, answer in batch.items()}


def alone(subject: Any, request: Likelihood) -> list[float]:
    """Log-probability and greediness from one pass over the whole text."""
    import torch

    context, continuation = subject.encoder.pair(request)
    ids = [*context, *continuation][-513:]
    with torch.no_grad(), subject._switched():
        logs = torch.log_softmax(subject.model(input_ids=torch.tensor([ids[:-1]])).logits[0].float(), dim=-1)
    rows = logs[-len(continuation) :]
    targets = torch.tensor(continuation)
    return [float(rows.gather(1, targets[:, None]).sum()), float(bool((rows.argmax(dim=-1) == targets).all()))]


@pytest.mark.parametrize("name", [None, "adapter"], ids=["base", "adapter"])
def test_shared_prefixes_change_no_likelihood(subject: Any, name: str | None) -> None:
    with subject.applied(name):
        found = answered(subject.answer(questions()))
        assert set(found) == {r.id for r in questions()}
        for request in questions():
            nats, greedy = alone(subject, request)
            assert found[request.id][0] == pytest.approx(nats, abs=1e-4), request.id
            assert found[request.id][1] == greedy


def test_base_and_adapter_differ(subject: Any) -> None:
    with subject.applied(None):
        base = answered(subject.answer(questions()))
    with subject.applied("adapter"):
        assert answered(subject.answer(questions())) != base
    with subject.applied(None):
        again = answered(subject.answer(questions()))
    assert {id_: nats for id_, (nats, _) in again.items()} == pytest.approx({id_: nats for id_, (nats, _) in base.items()}, abs=1e-4)


@contextmanager
def before_each_pass(subject: Any, seen: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """`seen` is given what the model is given, and returns what it gets."""

    def hook(_module: Any, args: Any, inputs: dict[str, Any]) -> Any:
        return args, seen(inputs)

    handle = subject.model.get_base_model().register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def test_what_texts_have_in_common_is_read_once(subject: Any) -> None:
    read: list[int] = []

    def counted(inputs: dict[str, Any]) -> dict[str, Any]:
        read.append(inputs["input_ids"].numel())
        return inputs

    asked = [r for r in questions() if r.id.startswith("q")]
    with subject.applied(None), before_each_pass(subject, counted):
        assert len(answered(subject.answer(asked))) == 28
    plain = sum(len(subject.encoder.scored(r).ids) for r in asked)
    tried = 5 * len(subject.encoder.scored(asked[0]).ids)  # that sharing is right for this model is looked at first
    assert sum(read) - tried < plain / 10


def test_a_model_that_reads_shared_texts_otherwise_is_asked_text_by_text(subject: Any) -> None:
    def blind(inputs: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in inputs.items() if k not in ("attention_mask", "position_ids")}

    asked = questions()[:8]
    with subject.applied(None):
        with before_each_pass(subject, blind):
            found = answered(subject.answer(asked))
        for request in asked:
            assert found[request.id][0] == pytest.approx(alone(subject, request)[0], abs=1e-4)


def test_a_subject_goes_on_with_the_batches_that_it_would_have_had(subject: Any) -> None:
    mixed: list[Request] = [*questions(), *(Generate(id=f"g{n}", text="ab" * n, max_new_tokens=6) for n in range(1, 10))]
    mixed += [Loss(id=f"l{n}", input_ids=tuple(range(5, 9 + n)), labels=(-100, *range(6, 9 + n))) for n in range(9)]
    with subject.applied(None):
        whole = list(subject.answer(mixed))
        done = {id_ for batch in whole[::2] for id_ in batch}
        assert list(subject.answer(mixed, skip=done)) == whole[1::2]
    assert {id_ for batch in whole for id_ in batch} == {r.id for r in mixed}


def test_an_answer_ends_before_the_first_stop(subject: Any) -> None:
    def asked(*stops: str) -> list[Generate]:
        return [Generate(id=f"g{n}", text="abc" * n + "hello", max_new_tokens=20, stops=stops) for n in range(1, 4)]

    with subject.applied(None):
        free = answered(subject.answer(asked()))
        stop = next(c for c in free["g1"][1:] if c.isascii())
        stopped = answered(subject.answer(asked(stop, "never said")))
    assert stopped == {id_: text.partition(stop)[0] for id_, text in free.items()}
    assert stopped != free


def test_prompts_are_cut_at_their_start_and_that_is_told(subject: Any) -> None:
    long, short = Generate(id="long", text="x" * 600 + "end", max_new_tokens=12), Generate(id="short", text="end", max_new_tokens=12)
    prompt = subject.encoder.prompt(long)
    assert (len(prompt.ids), prompt.budget, prompt.cut) == (500, 12, 103)
    assert subject.tokenizer.decode(prompt.ids).endswith("xend")
    assert subject.encoder.cut([long, short, *questions()]) == 2
    greedy = Generate(id="greedy", text="x" * 600, max_new_tokens=10_000)
    assert (len(subject.encoder.prompt(greedy).ids), subject.encoder.prompt(greedy).budget) == (256, 256)


@pytest.mark.parametrize("slice_bytes", [None, 1])
def test_losses_are_those_of_each_example_alone(subject: Any, monkeypatch: pytest.MonkeyPatch, slice_bytes: int | None) -> None:
    import torch

    from engine.evals.run import subject as subjects

    widths = list[int]()
    if slice_bytes is not None:  # of one token a row, for which the logits are copied at a time
        monkeypatch.setattr(subjects, "SLICE_BYTES", slice_bytes)
        computed = torch.nn.functional.cross_entropy
        monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda x, *a, **k: (widths.append(x.shape[2]), computed(x, *a, **k))[1])
    asked = [Loss(id=f"l{n}", input_ids=tuple(range(5, 12 + n)), labels=(-100, -100, *range(7, 12 + n))) for n in range(6)]
    with subject.applied("adapter"):
        found = answered(subject.answer(asked))
        for request in asked:
            with torch.no_grad():
                logs = torch.log_softmax(subject.model(input_ids=torch.tensor([request.input_ids])).logits[0].float(), dim=-1)
            expected = -sum(float(logs[at - 1, label]) for at, label in enumerate(request.labels) if label != -100)
            assert found[request.id] == [pytest.approx(expected, abs=1e-4), len(request.labels) - 2]
    assert set(widths) == (set() if slice_bytes is None else {1})


@pytest.mark.slow
def test_likelihoods_are_those_of_the_harness(subject: Any, place: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(place / "base")
    harness = HFLM(pretrained=model, tokenizer=subject.tokenizer, batch_size=4, device="cpu")
    asked = questions()
    theirs = harness.loglikelihood(
        [Instance(request_type="loglikelihood", doc={}, arguments=(r.context, r.continuation), idx=0) for r in asked], disable_tqdm=True
    )
    with subject.applied(None):
        ours = answered(subject.answer(asked))
    for request, (nats, greedy) in zip(asked, theirs, strict=True):
        assert ours[request.id] == [pytest.approx(nats, abs=1e-4), float(greedy)], request.id
    assert [harness._encode_pair(r.context, r.continuation) for r in asked if r.context] == [
        subject.encoder.pair(r) for r in asked if r.context
    ]


def changed_base(place: Path, target: Path, file: str, **changes: Any) -> Path:
    """The base with other values in one of its JSON files."""
    shutil.copytree(place / "base", target)
    body = json.loads((target / file).read_text())
    (target / file).write_text(json.dumps(body | changes))
    return target


def test_answers_are_greedy_whatever_the_models_own_generation_config_says(place: Path, subject: Any, tmp_path: Path) -> None:
    from engine.evals.run.subject import Subject

    own = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "min_new_tokens": 12}
    other = Subject(changed_base(place, tmp_path / "other", "generation_config.json", **own, bad_words_ids=[[9]]), batch_size=4)
    other.add("adapter", place / "adapter")
    asked = [Generate(id=f"g{n}", text="ab" * n, max_new_tokens=16) for n in range(1, 6)]
    for name in (None, "adapter"):
        with subject.applied(name), other.applied(name):
            assert answered(other.answer(asked)) == answered(subject.answer(asked))


DATED = (
    "{{ '<|im_start|>system\n' + strftime_now('%d %b %Y') + (tools | tojson if tools else '') + '<|im_end|>\n' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}


def test_prompts_are_rendered_as_training_renders_them_with_its_date_and_their_tools(place: Path, tmp_path: Path) -> None:
    from engine.evals.run.subject import Subject
    from engine.evals.suites import harness_tasks

    base = changed_base(place, tmp_path / "dated", "tokenizer_config.json", chat_template=DATED)
    encoder, trained = Subject(base).encoder, ChatTokenizer.load(base)
    asked = Generate(id="g", messages=({"role": "user", "content": "rain?"},), tools=(TOOL,), max_new_tokens=8)
    assert list(encoder.prompt(asked).ids) == trained.render_turns([{"role": "user", "content": "rain?"}], tools=[TOOL])
    text = encoder.tokenizer.decode(encoder.prompt(asked).ids)
    assert "26 Jul 2024" in text and datetime.now().strftime("%d %b %Y") not in text
    assert '"weather"' in text
    plain = Generate(id="g", messages=asked.messages, max_new_tokens=8)
    assert "weather" not in encoder.tokenizer.decode(encoder.prompt(plain).ids)
    begun = [{"role": "user", "content": "rain?"}, {"role": "assistant", "content": "It "}]
    assert "26 Jul 2024" in harness_tasks._chat(base, begun[:1])
    assert harness_tasks._chat(base, begun, add_generation_prompt=False).endswith("<|im_start|>assistant\nIt ")


def test_a_fault_of_the_accelerator_is_not_the_adapters(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from engine.evals.run import subject as module

    found = module.Subject(place / "base")
    for fault in (RuntimeError("CUDA error: an illegal memory access was encountered"), torch.AcceleratorError("uncorrectable ECC error")):

        def failing(*_: Any, fault: Exception = fault, **__: Any) -> Any:
            raise fault

        monkeypatch.setattr(module.PeftModel, "from_pretrained", failing)
        with pytest.raises(type(fault)):
            found.add("adapter", place / "adapter")


def test_every_step_of_a_batch_is_counted(place: Path) -> None:
    from engine.evals.run.subject import Subject

    steps = list[int]()
    found = Subject(place / "base", on_step=lambda: steps.append(1))
    (batch,) = found.answer([Generate(id=f"g{n}", text="ab" * n, max_new_tokens=6) for n in range(1, 4)])
    assert len(batch) == 3 and 1 <= len(steps) <= 6


@pytest.mark.parametrize("damage", ["weights", "config"])
def test_an_adapter_whose_files_are_damaged_is_unloadable(place: Path, subject: Any, tmp_path: Path, damage: str) -> None:
    directory = tmp_path / "damaged"
    shutil.copytree(place / "adapter", directory)
    if damage == "weights":
        (directory / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    else:
        (directory / "adapter_config.json").write_text('{"peft_type": "LORA", "r": "eight", "target_modules": 3}')
    with pytest.raises(InvalidRequest) as refused:
        subject.add(f"damaged {damage}", directory)
    assert refused.value.code == "adapter_unloadable"
