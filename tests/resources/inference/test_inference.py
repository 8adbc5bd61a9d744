"""The embedded inference server, driven by the real `openai` client."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from control_plane.platform.settings import load as load_settings
from core.base_models import model_digest
from core.errors import Conflict
from deploy.doctor.check_findings import Site, run
from deploy.doctor.service_checks import CHECKS
from engine.adapters import package
from engine.adapters.package import ADAPTER_WEIGHTS
from resources.inference.fleet_client import HttpFleet
from tests.support.models.tiny_adapter import adapter_arrays, build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model
from tests.support.servers.inference_server import HEADERS, TOKEN, free_port, inference_server

MAX_ADAPTERS = 4
PROMPTS = ["Hello", "a considerably longer prompt than the one before it, so that padding matters", "x"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inference")
    base = build_tiny_model(root / "base")
    for seed, name in enumerate(["acme", "globex", "third", "fourth", "fifth", "sixth"], 1):
        build_tiny_adapter(root / name, base, base_name="tiny", seed=seed, rank=8 if seed % 2 else 16)
    return root


@pytest.fixture(scope="module")
def url(place: Path) -> Iterator[str]:
    with inference_server(place / "base", port=free_port(), options=("--max-adapters", str(MAX_ADAPTERS))) as found:
        for name in ("acme", "globex"):
            assert load(found, f"ft:{name}", place / name).status_code == 200
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, timeout=30) as made:
        yield made


def load(url: str, name: str, directory: Path) -> httpx.Response:
    return httpx.post(f"{url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(directory)}, headers=HEADERS, timeout=30)


def unload(url: str, name: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name}, headers=HEADERS, timeout=30)


def ask(client: openai.OpenAI, model: str, prompt: str = PROMPTS[0], **options: Any) -> str:
    settings = {"max_tokens": 16, "temperature": 0, **options}
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": prompt}], **settings)
    return answer.choices[0].message.content or ""


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_answers_of_base_and_adapters_are_those_of_transformers_and_peft(client: openai.OpenAI, place: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(place / "base")
    for name in ("base", "acme", "globex"):
        model: Any = AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32)
        model = (model if name == "base" else PeftModel.from_pretrained(model, str(place / name))).eval()
        for prompt in PROMPTS:
            messages = [{"role": "user", "content": prompt}]
            ids = torch.tensor([tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)])
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
            reference = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            assert ask(client, "tiny" if name == "base" else f"ft:{name}", prompt) == reference


def test_the_doctor_finds_nothing_wrong_with_it(url: str, tmp_path: Path) -> None:
    settings = load_settings({"FT_HOME": str(tmp_path), "FT_INFERENCE_URLS": url, "FT_INFERENCE_TOKEN": TOKEN})
    (found,) = run({"serving": CHECKS["serving"]}, Site(settings=settings), limit_s=60.0)["serving"]
    assert (found.status, found.found) == ("ok", f"{url} serves tiny with 2 adapters")


def test_two_tenants_and_the_base_in_one_batch_answer_as_they_do_alone(client: openai.OpenAI) -> None:
    calls = [(m, p, n) for n in (5, 40) for p in PROMPTS for m in ("tiny", "ft:acme", "ft:globex")]
    alone = [ask(client, m, p, max_tokens=n) for m, p, n in calls]
    assert len(set(alone)) > len(calls) // 2, "the models answer alike: the test would see nothing"
    for _ in range(3):
        with ThreadPoolExecutor(len(calls)) as pool:
            together = list(pool.map(lambda c: ask(client, c[0], c[1], max_tokens=c[2]), calls))
        assert together == alone


def test_an_adapter_is_loaded_used_and_unloaded_without_a_restart(client: openai.OpenAI, url: str, place: Path) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(client, "ft:third")
    assert unknown.value.code == "model_not_found"
    answer = load(url, "ft:third", place / "third")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'ft:third' added successfully.")
    assert ask(client, "ft:third") not in {ask(client, "tiny"), ask(client, "ft:acme")}
    cards = {m.id: m for m in client.models.list()}
    assert cards["ft:third"].model_dump()["parent"] == "tiny"
    assert cards["ft:third"].model_dump()["root"] == str(place / "third")
    assert unload(url, "ft:third").text == "Success: LoRA adapter 'ft:third' removed successfully."
    with pytest.raises(openai.NotFoundError):
        ask(client, "ft:third")
    assert unload(url, "ft:third").status_code == 404


def test_a_name_is_never_used_for_other_weights(url: str, place: Path) -> None:
    again = load(url, "ft:acme", place / "acme")
    assert again.status_code == 400
    assert again.json()["error"]["type"] == "InvalidUserInput"
    assert "has already been loaded" in again.json()["error"]["message"]
    assert load(url, "ft:fourth", place / "fourth").status_code == 200
    unload(url, "ft:fourth")
    other = load(url, "ft:fourth", place / "third")
    assert other.status_code == 400
    assert "was used for other weights before" in other.json()["error"]["message"]
    assert load(url, "ft:fourth", place / "fourth").status_code == 200
    unload(url, "ft:fourth")


@pytest.mark.parametrize(
    ("kind", "status", "says"),
    [
        ("nan", 400, "not_finite"),
        ("shape", 400, "shape_mismatch"),
        ("dora", 400, "needs_merge"),
        ("rank", 400, "rank_not_servable"),
        ("base", 400, "base_name_mismatch"),
        ("torn", 400, "unreadable"),
        ("absent", 404, "No adapter found"),
    ],
)
def test_a_bad_adapter_is_refused_for_good_and_harms_nobody(
    client: openai.OpenAI, url: str, place: Path, tmp_path: Path, kind: str, status: int, says: str
) -> None:
    before = ask(client, "ft:acme"), ask(client, "tiny")
    changes: dict[str, dict[str, Any]] = {"dora": {"use_dora": True}, "base": {"base_model_name_or_path": "other"}}
    bad = build_tiny_adapter(
        tmp_path / "bad", place / "base", base_name="tiny", rank=256 if kind == "rank" else 8, config=changes.get(kind)
    )
    arrays = adapter_arrays(place / "base")
    if kind == "nan":
        save_file({k: np.full_like(v, np.nan) for k, v in arrays.items()}, bad / ADAPTER_WEIGHTS)
    elif kind == "shape":
        save_file({k: v[:, :32].copy() for k, v in arrays.items()}, bad / ADAPTER_WEIGHTS)
    elif kind == "torn":
        (bad / ADAPTER_WEIGHTS).write_bytes((bad / ADAPTER_WEIGHTS).read_bytes()[:-1])
    elif kind == "absent":
        shutil.rmtree(bad)
    answer = load(url, f"ft:bad-{kind}", bad)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == status
    assert (ask(client, "ft:acme"), ask(client, "tiny")) == before


def test_an_adapter_is_served_only_on_the_bytes_that_it_was_trained_on(url: str, place: Path, tmp_path: Path) -> None:
    for name, digest, status in (("right", model_digest(place / "base"), 200), ("stale", "0" * 64, 400)):
        package.write_package(place / "third", tmp_path / name, served_name="tiny", base_digest=digest)
        answer = load(url, f"ft:{name}", tmp_path / name)
        assert answer.status_code == status, answer.text
    assert "base_digest_mismatch" in answer.text
    unload(url, "ft:right")


def test_more_adapters_than_fit_are_read_again_when_they_are_asked_for(client: openai.OpenAI, url: str, place: Path) -> None:
    names = ["third", "fourth", "fifth", "sixth"]
    first = {}
    for name in names:
        load(url, f"lru:{name}", place / name)
        first[name] = ask(client, f"lru:{name}")
    assert len(names) + 2 > MAX_ADAPTERS
    assert {name: ask(client, f"lru:{name}") for name in names} == first
    gone = build_tiny_adapter(place / "gone", place / "base", base_name="tiny", seed=9)
    load(url, "lru:gone", gone)
    shutil.rmtree(gone)
    for name in names:
        ask(client, f"lru:{name}")
    with pytest.raises(openai.APIStatusError):
        ask(client, "lru:gone")
    assert ask(client, "lru:third") == first["third"], "one deleted directory must not take the server down"
    for name in [*names, "gone"]:
        unload(url, f"lru:{name}")


def test_a_request_in_flight_ends_with_its_adapter_although_it_is_unloaded(client: openai.OpenAI, url: str, place: Path) -> None:
    load(url, "ft:leaving", place / "fifth")
    whole = ask(client, "ft:leaving", max_tokens=200)
    stream = client.chat.completions.create(
        model="ft:leaving", messages=[{"role": "user", "content": PROMPTS[0]}], max_tokens=200, temperature=0, stream=True
    )
    pieces = [next(stream).choices[0].delta.content or "" for _ in range(2)]
    assert unload(url, "ft:leaving").status_code == 200
    pieces += [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == whole


def test_loading_and_unloading_fail_no_request(client: openai.OpenAI, url: str, place: Path) -> None:
    stop, failures, answers = threading.Event(), [], set()

    def traffic() -> None:
        while not stop.is_set():
            try:
                answers.add(ask(client, "ft:acme"))
            except openai.OpenAIError as e:
                failures.append(e)

    threads = [threading.Thread(target=traffic) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(8):
        assert load(url, f"swap:{n}", place / "sixth").status_code == 200
        assert unload(url, f"swap:{n}").status_code == 200
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(answers) == 1


def test_a_stream_holds_the_same_text_and_its_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="ft:acme", messages=[{"role": "user", "content": PROMPTS[1]}], max_tokens=16, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ask(client, "ft:acme", PROMPTS[1])
    assert chunks[0].choices[0].delta.role == "assistant"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason in {"length", "stop"}


def test_usage_of_a_stream_counts_tokens_and_not_pieces(client: openai.OpenAI) -> None:
    """A stop string that the answer only begins: the text held back for it comes in one piece."""
    begun = ask(client, "ft:globex", max_tokens=12)[2:10]
    request: Any = {
        "model": "ft:globex", "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 12, "temperature": 0,
        "stop": [f"{begun}\x00"],
    }  # fmt: skip
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    pieces = [text for c in chunks for choice in c.choices if (text := choice.delta.content)]
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    assert len(pieces) < 12, "each token came in a piece of its own: no text was held back"
    assert chunks[-1].usage == whole.usage


def test_a_stop_string_ends_the_answer_and_is_not_shown(client: openai.OpenAI) -> None:
    whole = ask(client, "ft:globex", max_tokens=40)
    stop = whole[3:6]
    cut = client.chat.completions.create(
        model="ft:globex", messages=[{"role": "user", "content": PROMPTS[0]}], max_completion_tokens=40, temperature=0, stop=[stop]
    )
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_of_several_stop_strings_the_one_met_first_ends_the_answer(client: openai.OpenAI) -> None:
    whole = ask(client, "ft:globex", max_tokens=40)
    at = next(i for i in range(1, len(whole) - 1) if whole[i + 1] not in whole[: i + 1])
    later, earlier = whole[at + 1], whole[at : at + 2]
    assert ask(client, "ft:globex", max_tokens=40, stop=[later, earlier]) == whole[:at], "both end with the same token"


def test_a_seed_draws_the_same_answer_whoever_else_asks(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 1.2, "top_p": 0.9, "seed": 7, "max_tokens": 30}
    alone = ask(client, "ft:acme", **options)
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(ask, client, "tiny", p, temperature=1.0, max_tokens=30) for p in PROMPTS]
        assert pool.submit(ask, client, "ft:acme", **options).result() == alone
        assert len({other.result() for other in others}) == len(others)
    assert ask(client, "ft:acme", **{**options, "seed": 8}) != alone
    assert ask(client, "ft:acme", **{**options, "seed": 0}) == ask(client, "ft:acme", **{**options, "seed": 0})


def test_text_completions_are_served_too(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="ft:acme", prompt="Once", max_tokens=5, temperature=0)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 5)


def test_what_does_not_fit_the_context_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt has 619 tokens; the maximum context length of tiny is 512 tokens") as caught:
        ask(client, "tiny", "x" * 600)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=r"has 119 tokens and max_tokens asks for 500 more; .* Lower max_tokens to 393"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 100}], max_tokens=500)


def test_a_malformed_request_is_answered_in_openais_shape(url: str) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", json={"model": "tiny", "messages": [], "temperature": 9}, headers=HEADERS)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert json.loads(httpx.get(f"{url}/v1/models", headers=HEADERS).text)["object"] == "list"


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
@pytest.mark.parametrize("stream", [True, False])
def test_a_seed_beyond_64_bits_is_refused(url: str, client: openai.OpenAI, seed: int, *, stream: bool) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 1, "seed": seed, "stream": stream}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seed")
    assert client.completions.create(model="tiny", prompt="Once", max_tokens=1, seed=seed - 1 if seed > 0 else seed + 1).choices


def test_an_adapter_of_a_base_without_a_chat_template_is_probed(place: Path, tmp_path: Path) -> None:
    base = build_tiny_model(tmp_path / "base", template=None)
    with inference_server(base, port=free_port()) as url, closing(HttpFleet([url], token=TOKEN)) as fleet:
        fleet.load(url, "ft:acme", place / "acme")
        assert fleet.probe(url, "ft:acme") > 0.0
        assert fleet.probe(url, "tiny") > 0.0
        with pytest.raises(Conflict, match="404"):
            fleet.probe(url, "ft:globex")


LONG = "word" * 750_000  # one word, the slowest kind of text
HI = {"role": "user", "content": "Hi?"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": LONG}}
TOO_LONG: dict[str, Any] = {
    "content": [{"role": "user", "content": LONG}],
    "content parts": [{"role": "user", "content": [{"type": "text", "text": LONG}]}],
    "reasoning": [HI, {"role": "assistant", "content": "Yes.", "reasoning_content": LONG}, HI],
    "thinking of an earlier turn": [HI, {"role": "assistant", "content": f"<think>{LONG}</think>Yes."}, HI],
    "tool calls": [HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}, HI],
    "keys": [{**HI, LONG: 1}],
    "many messages, each of which would fit": [{"role": role, "content": LONG[:15_000]} for role in ("user", "assistant") * 100],
}


@pytest.mark.parametrize("case", [*TOO_LONG, "prompt"])
def test_3_mb_of_text_are_refused_by_their_length_whichever_field_has_them(url: str, case: str) -> None:
    text = case == "prompt"
    body = {"model": "tiny", "prompt": LONG} if text else {"model": "tiny", "messages": TOO_LONG[case]}
    answer = httpx.post(f"{url}/v1/{'completions' if text else 'chat/completions'}", json=body, headers=HEADERS, timeout=300)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt" if text else "messages")
    assert "about 750" in error["message"], "tokens at four characters each"
    assert "maximum context length of tiny is 512 tokens, the answer included, in at most 16384 characters" in error["message"]
    assert "300" in error["message"]


CALLS = [
    ("GET", "/health", None),
    ("GET", "/v1/models", None),
    ("GET", "/openapi.json", None),
    ("GET", "/no-such-path", None),
    ("POST", "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
    ("POST", "/v1/completions", {"model": "tiny", "prompt": "hi"}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "ft:intruder", "lora_path": "/tmp"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "ft:acme"}),
]


def test_the_server_publishes_no_description_of_itself(url: str) -> None:
    assert [httpx.get(f"{url}{path}", headers=HEADERS).status_code for path in ("/openapi.json", "/docs", "/redoc")] == [404] * 3


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
def test_a_call_without_the_token_of_the_stack_does_nothing(url: str, method: str, path: str, body: dict[str, Any] | None) -> None:
    for authorization in ("", "Bearer", f"Bearer {TOKEN}x", f"bearer {TOKEN}", TOKEN, "Bearer ft-sk-somebody"):
        answer = httpx.request(method, f"{url}{path}", json=body, headers={"authorization": authorization})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_token")
    assert "ft:acme" in [m["id"] for m in httpx.get(f"{url}/v1/models", headers=HEADERS).json()["data"]]
