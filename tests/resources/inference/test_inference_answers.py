"""Answers of the embedded inference server under way: clients that hang up, and prompts that are scored beside other requests."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from starlette.types import ASGIApp
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from control_plane.serving.gateway import TENANT, WEIGHT
from resources.inference import logprobs
from resources.inference.answers import Call, Echo, Part, _chunks, events, parts
from resources.inference.engine.batch import PREFILL_SLICE, SLICE, Row
from resources.inference.engine.engine_thread import Engine, Generation, Piece, Scoring
from resources.inference.engine.fair_turns import Share
from resources.inference.engine.sampler import Sampling
from resources.inference.server import Server, create_app
from tests.support.jobs.followed_jobs import until
from tests.support.models.tiny_model import CONTEXT, build_tiny_model
from tests.support.servers.inference_server import HEADERS, TOKEN


class Watched(Engine):
    """Remembers what it was asked for, and takes its time for each step."""

    step_s = 0.0

    def __init__(self, model_dir: Path) -> None:
        self.asked: list[Generation] = []
        self.scored: list[Scoring] = []
        super().__init__(model_dir)

    def submit(self, *given: Any, **options: Any) -> Generation:
        self.asked.append(super().submit(*given, **options))
        return self.asked[-1]

    def score(self, *given: Any, **options: Any) -> Scoring:
        self.scored.append(super().score(*given, **options))
        return self.scored[-1]

    def _advance(self, joining: list[Generation]) -> None:
        time.sleep(self.step_s)
        super()._advance(joining)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(build_tiny_model(tmp_path))
    try:
        yield made
    finally:
        made.close()


@contextmanager
def between_steps(engine: Engine) -> Iterator[None]:
    """Hold the engine's thread between two steps: what is submitted meanwhile has come at once."""
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go_on.wait(60)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine._between_steps, hold)
        assert held.wait(60)
        try:
            yield
        finally:
            go_on.set()
            waiting.result()


def test_a_short_prompt_does_not_wait_for_the_long_one_of_another_tenant(engine: Watched) -> None:
    began, ended = list[str](), threading.Barrier(3)

    def submit(name: str, num_tokens: int) -> None:
        def emit(piece: Piece) -> None:
            if piece.completion_tokens == 1:
                began.append(name)
            if piece.finish_reason:
                threading.Thread(target=ended.wait, args=[60]).start()

        prompt, share = [5 + n % 50 for n in range(num_tokens)], Share(tenant=name[0])
        engine.submit(prompt, adapter=None, max_tokens=1, sampling=Sampling(), stops=[], share=share, emit=emit)

    with between_steps(engine):
        submit("a long", 3 * PREFILL_SLICE + 1)
    with between_steps(engine):
        submit("b short", 4)
    ended.wait(60)
    assert began == ["b short", "a long"]


def test_prompts_in_slices_have_the_logits_of_whole_ones(engine: Watched) -> None:
    prompts = [[5 + (7 * n + 3 * k) % 50 for n in range(length)] for k, length in enumerate((2 * PREFILL_SLICE + 5, 3, PREFILL_SLICE))]
    model = engine._batch._model
    with between_steps(engine), torch.inference_mode():
        *unfinished, logits = engine._make_batch().prefill([Row(prompt=prompt, adapter=None) for prompt in prompts])
        engine._batch._routing.set([None])
        whole = torch.stack([model(input_ids=torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
    assert len(unfinished) >= 2 and not any(part is not None for part in unfinished)
    assert logits is not None
    torch.testing.assert_close(logits, whole.float(), rtol=1e-4, atol=1e-4)


def test_a_request_that_is_cancelled_during_its_prefill_leaves_the_others_whole(engine: Watched) -> None:
    answers: dict[str, list[Piece]] = {"kept": [], "gone": [], "alone": []}

    def submit(name: str, prompt: list[int]) -> Generation:
        emit = answers[name].append
        return engine.submit(prompt, adapter=None, max_tokens=4, sampling=Sampling(temperature=0), stops=[], emit=emit)

    kept, gone = [5 + n % 50 for n in range(70)], [9 + n % 40 for n in range(90)]
    with between_steps(engine):
        submit("kept", kept)
        cancelled = submit("gone", gone)
    with between_steps(engine):  # after the first slice of both
        cancelled.cancel()
    until(lambda: bool(answers["kept"]) and answers["kept"][-1].finish_reason is not None)
    submit("alone", kept)
    until(lambda: bool(answers["alone"]) and answers["alone"][-1].finish_reason is not None)
    assert "".join(p.text for p in answers["kept"]) == "".join(p.text for p in answers["alone"])
    assert answers["gone"] == []


def call(**given: Any) -> Call:
    fields: dict[str, Any] = {"prompts": ([1],), "max_tokens": (10**6,), "sampling": Sampling(), "chat": True, **given}
    return Call(model="tiny", adapter=None, stops=[], constraint=None, **fields)


def server_of(engine: Engine) -> Server:
    return Server(engine, served_name="tiny", base_shapes={}, max_resident=1, max_rank=8)


def test_client_that_hangs_up_on_a_stream_frees_its_place_in_the_batch(engine: Watched) -> None:
    async def read_one_piece() -> None:
        answer = events(engine, server_of(engine).store, call())
        assert isinstance(answer, AsyncGenerator)
        await anext(answer)
        await anext(answer)
        await answer.aclose()

    asyncio.run(read_one_piece())
    assert [one.cancelled.is_set() for one in engine.asked] == [True]


def test_client_that_hangs_up_on_a_whole_answer_frees_its_places(engine: Watched, serve: Callable[[ASGIApp], str]) -> None:
    engine.step_s = 0.05
    url = serve(create_app(server_of(engine), token=TOKEN))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "n": 3, "logit_bias": {"64": 100}}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/chat/completions", json=body, headers=HEADERS, timeout=2)
    deadline = time.monotonic() + 15
    while not (len(engine.asked) == 3 and all(one.cancelled.is_set() for one in engine.asked)):
        assert time.monotonic() < deadline, "the generations run on"
        time.sleep(0.05)
    assert all(len(one.row.generated) < 400 for one in engine.asked)


def test_a_tenant_beside_one_that_floods_waits_for_one_step(engine: Watched, serve: Callable[[ASGIApp], str]) -> None:
    """150 streams fill three quarters of the batch; the header names whose request it is."""
    engine.step_s = 0.02
    url = serve(create_app(server_of(engine), token=TOKEN))
    body = {"model": "tiny", "prompt": "a", "max_tokens": 400, "n": 15, "logit_bias": {"64": 100}}
    with httpx.Client(base_url=url, headers=HEADERS, timeout=60) as client, ThreadPoolExecutor(10) as pool:
        flood = [pool.submit(client.post, "/v1/completions", json=body, headers={TENANT: "loud"}) for _ in range(10)]
        until(lambda: sum(bool(one.row.generated) for one in engine.asked) == 24)
        began = time.monotonic()
        quick = {**body, "n": 1, "max_tokens": 2}
        assert client.post("/v1/completions", json=quick, headers={TENANT: "quiet"}).status_code == 200
        assert time.monotonic() - began < 5, "it waited for an answer of the other tenant"
        assert sum(bool(one.row.generated) for one in engine.asked) == 25, "no further one of the flood joined"
        assert engine.asked[-1].share == Share(tenant="quiet")
        for one in engine.asked:
            one.max_tokens = 1
        assert {answer.result().status_code for answer in flood} == {200}


def test_more_answers_than_wait_are_refused(engine: Watched, serve: Callable[[ASGIApp], str]) -> None:
    engine.step_s = 0.02
    url = serve(create_app(server_of(engine), token=TOKEN))
    body = {"model": "tiny", "prompt": "a", "max_tokens": 400, "n": 16, "logit_bias": {"64": 100}}
    with httpx.Client(base_url=url, headers=HEADERS, timeout=60) as client, ThreadPoolExecutor(40) as pool:
        flood = [pool.submit(client.post, "/v1/completions", json=body, headers={TENANT: "loud", WEIGHT: "4"}) for _ in range(40)]
        until(lambda: any(answer.done() for answer in flood))
        refused = next(answer for answer in flood if answer.done()).result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert client.post("/v1/completions", json={**body, "n": 1, "max_tokens": 2}, headers={TENANT: "quiet"}).status_code == 200
        assert engine.asked[0].share == Share(tenant="loud", weight=4)
        engine.step_s = 0
        for one in engine.asked:
            one.max_tokens = 1
        assert {answer.result().status_code for answer in flood} == {200, 429}


def test_a_step_of_other_requests_waits_for_one_slice_of_a_scored_prompt(engine: Watched) -> None:
    order, ended = list[str](), threading.Event()
    ids = list(range(200)) * 3
    scored = [engine.score(ids[: CONTEXT - 1], adapter=None, top=20, emit=lambda _: order.append("slice")) for _ in range(30)]

    def emit(piece: Any) -> None:
        order.append("piece")
        if piece.finish_reason:
            ended.set()

    engine.submit([1], adapter=None, max_tokens=12, sampling=Sampling(temperature=0, logit_bias={64: 100}), stops=[], emit=emit)
    assert ended.wait(60)
    begun = order[order.index("piece") :]
    assert begun.count("piece") == 12
    assert max(len(list(group)) for kind, group in itertools.groupby(begun[: 12 * 2]) if kind == "slice") == 1
    for one in scored:
        one.cancel()
    seen, answered = order.count("slice"), threading.Event()
    engine.score([1, 2], adapter=None, top=0, emit=lambda _: answered.set())
    assert answered.wait(60)
    assert order.count("slice") <= seen + 1 < 30 * 2, "cancelled prompts are not scored"


def test_scores_of_slices_are_those_of_the_whole_prompt(engine: Watched) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    ids = [(n * 7) % 256 for n in range(SLICE + 1)]
    for prompt in (ids, [*ids, 5], ids[:2]):
        found, done = list[Any](), threading.Event()

        def emit(scores: Any, found: list[Any] = found, done: threading.Event = done, prompt: list[int] = prompt) -> None:
            found.extend(scores)
            if len(found) == len(prompt) - 1:
                done.set()

        engine.score(prompt, adapter=None, top=1, emit=emit)
        assert done.wait(60)
        model: Any = AutoModelForCausalLM.from_pretrained(engine.tokenizer.name_or_path, dtype=torch.float32)
        with torch.inference_mode():
            wanted = torch.log_softmax(model(torch.tensor([prompt])).logits[0], dim=-1)
        assert [one.token for one in found] == prompt[1:]
        for at, one in enumerate(found):
            assert one.logprob == pytest.approx(float(wanted[at, prompt[at + 1]]), abs=1e-4)
            assert one.top[0][1] == pytest.approx(float(wanted[at].max()), abs=1e-4)


def test_each_prompt_is_scored_once_for_all_of_its_answers_and_sent_as_it_comes(engine: Watched) -> None:
    ids = list(range(100))
    asked = call(
        prompts=(ids, ids[:50]), n=4, max_tokens=(0, 0), chat=False, sampling=Sampling(top_logprobs=2),
        echo=tuple(Echo(text=engine.decode(p), offsets=engine.text_offsets(p)) for p in (ids, ids[:50])),
    )  # fmt: skip

    async def run() -> list[Any]:
        found, scored_at_first = [], None
        async for part in parts(engine, asked):
            scored_at_first = len(engine.scored) if scored_at_first is None else scored_at_first
            found.append(part)
        assert scored_at_first == 0
        return found

    found = asyncio.run(run())
    assert len(engine.scored) == 2
    of_choice = [logprobs.joined([p.logprobs for p in found if p.choice == n and p.logprobs]) for n in range(8)]
    assert [len(one["tokens"]) for one in of_choice] == [100] * 4 + [50] * 4
    assert of_choice[0] == of_choice[3] != of_choice[4]


@pytest.mark.parametrize("reason", [None, "tool_calls"])
def test_the_log_probabilities_of_a_part_are_in_one_of_its_chunks(reason: str | None) -> None:
    asked = call(prompts=([1],), max_tokens=(5,), chat=True, sampling=Sampling(top_logprobs=1))
    of_tokens = {"content": [{"token": "a", "logprob": -0.5}]}
    deltas = [{"content": "a"}, {"tool_calls": [{"index": 0}]}, {"tool_calls": [{"index": 1}]}]
    for given in (deltas, deltas[:1], []):
        made = list(_chunks(asked, Part(choice=0, deltas=given, finish_reason=reason, logprobs=of_tokens)))
        found: list[Any] = [chunk["choices"] for chunk in made]
        assert [choice["delta"] for (choice,) in found][: len(given)] == given
        assert [choice["logprobs"] for (choice,) in found] == [of_tokens] + [None] * (len(found) - 1)


def test_client_that_hangs_up_ends_the_scoring_of_its_prompts(engine: Watched, serve: Callable[[ASGIApp], str]) -> None:
    engine.step_s = 0.2
    url = serve(create_app(server_of(engine), token=TOKEN))
    body = {"model": "tiny", "prompt": [[1] * 500] * 60, "max_tokens": 0, "echo": True, "logprobs": 1}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=3)
    deadline = time.monotonic() + 10
    while not (engine.scored and engine.scored[-1].cancelled.is_set()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)
    assert engine.scored[-1].cancelled.is_set()
    assert len(engine.scored) < 60


def test_a_request_with_too_many_tokens_to_score_is_refused(engine: Watched, serve: Callable[[ASGIApp], str]) -> None:
    url = serve(create_app(server_of(engine), token=TOKEN))
    body = {"model": "tiny", "prompt": [[1] * 500] * 33, "n": 2, "max_tokens": 1, "echo": True, "logprobs": 1}
    error = httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=30).json()["error"]
    assert (error["param"], "33000 tokens" in error["message"], "32768" in error["message"]) == ("prompt", True, True)
    assert engine.scored == []


def test_each_prompt_of_a_list_has_the_space_that_it_leaves(engine: Watched, serve: Callable[[ASGIApp], str]) -> None:
    url = serve(create_app(server_of(engine), token=TOKEN))
    body = {"model": "tiny", "prompt": [[1] * (CONTEXT - 7), [1]], "logit_bias": {"64": 100}}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=60).json()
    assert [len(choice["text"]) for choice in answer["choices"]] == [7, 16]


def _sentencepiece(directory: Path) -> None:
    """Give the tiny model a tokenizer like Llama 2's: words begin with their space, bytes are a fallback, a text begins with ``<s>``."""
    vocab = {token: n for n, token in enumerate(("<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "\u2581b"))}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte - 0x80 for byte in range(0x80, 0x100)}
    made = Tokenizer(
        models.BPE(vocab=vocab, merges=[("\u2581", "a"), ("\u2581", "b")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    made.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config |= {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))


def test_tokens_that_begin_with_a_space_or_hold_a_byte_have_their_own_names(tmp_path: Path, serve: Callable[[ASGIApp], str]) -> None:
    base = build_tiny_model(tmp_path)
    _sentencepiece(base)
    engine = Engine(base)
    try:
        url = serve(create_app(server_of(engine), token=TOKEN))
        body = {"model": "tiny", "prompt": "a b\u00e9ba", "max_tokens": 2, "echo": True, "logprobs": 20, "logit_bias": {"7": 100}}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=60).json()["choices"][0]
        found = answer["logprobs"]
        assert found["tokens"][:7] == ["<s>", " a", " b", "bytes:\\xc3", "bytes:\\xa9", "b", "a"]
        assert found["text_offset"][:8] == [0, 0, 1, 3, 4, 4, 5, 6]
        assert [len(of_one) >= 20 for of_one in found["top_logprobs"][1:]] == [True] * 8, "no two tokens share a key"
        chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprobs": True}
        chat |= {"logit_bias": {str(8 + 0x43): 100}}
        content = httpx.post(f"{url}/v1/chat/completions", json=chat, headers=HEADERS, timeout=60).json()["choices"][0]["logprobs"][
            "content"
        ]
        assert (content[0]["token"], content[0]["bytes"]) == ("bytes:\\xc3", [0xC3])
    finally:
        engine.close()
