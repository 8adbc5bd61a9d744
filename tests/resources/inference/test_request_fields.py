"""Fields of requests on the embedded server: each has its effect, is known to have none, or is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import completion_create_params as of_completion
from openai.types.chat import completion_create_params as of_chat

from resources.inference import request_fields
from resources.inference.logprobs import text_of
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model
from tests.support.servers.inference_server import HEADERS, TOKEN, free_port, inference_server

ASK: Any = [{"role": "user", "content": "Hello"}]
TEXT = "Name three colours of the sea."
FIELDS = {
    "chat": of_chat.CompletionCreateParamsBase.__annotations__,
    "completion": of_completion.CompletionCreateParamsBase.__annotations__,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("fields") / "base")


@pytest.fixture(scope="module")
def client(base: Path) -> Iterator[openai.OpenAI]:
    import httpx

    build_tiny_adapter(base.parent / "acme", base, base_name="tiny", seed=1, rank=8)
    with inference_server(base, port=free_port()) as url:
        loaded = {"lora_name": "acme", "lora_path": str(base.parent / "acme")}
        assert httpx.post(f"{url}/v1/load_lora_adapter", json=loaded, headers=HEADERS, timeout=30).is_success
        with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, timeout=60) as made:
            yield made


@pytest.fixture(scope="module")
def reference(base: Path) -> Any:
    """Log-probabilities of the next token after given tokens, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    def of(ids: list[int]) -> Any:
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)

    return of


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_every_field_of_the_installed_client_is_decided(kind: request_fields.Kind) -> None:
    known = request_fields.USED[kind] | request_fields.WITHOUT_EFFECT | request_fields.NEUTRAL.keys()
    assert {*FIELDS[kind], "stream"} <= known
    assert not request_fields.WITHOUT_EFFECT & request_fields.USED[kind]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_null_means_absent_in_every_optional_field(client: openai.OpenAI, kind: str) -> None:
    nulls = {name: None for name in FIELDS[kind] if name not in ("model", "messages", "prompt")}
    own: Any = {"messages": ASK} if kind == "chat" else {"prompt": "a"}
    create: Any = client.chat.completions.create if kind == "chat" else client.completions.create
    assert create(model="tiny", extra_body={**nulls, "max_tokens": 1, "stream_options": {"include_usage": None}}, **own).choices


@pytest.mark.parametrize(
    ("given", "code", "param", "said"),
    [
        ({"temprature": 0.5}, "unknown_parameter", "temprature", "did you mean temperature"),
        ({"audio": {"voice": "a"}}, "unsupported_parameter", "audio", "not supported"),
        ({"store": True}, "unsupported_parameter", "store", "not stored"),
        ({"top_k": 5}, "unsupported_parameter", "top_k", "not supported"),
        ({"min_p": False}, "unsupported_parameter", "min_p", "not supported"),
        ({"repetition_penalty": True}, "unsupported_parameter", "repetition_penalty", "not supported"),
        ({"guided_json": {}}, "unsupported_parameter", "guided_json", "use response_format"),
        ({"continue_final_message": True}, "unsupported_parameter", "continue_final_message", "not supported"),
        ({"reasoning_effort": "high"}, "unsupported_parameter", "reasoning_effort", "chat_template_kwargs"),
        ({"stop": ["x"] * 17}, "invalid_request", "stop", "at most 16"),
        ({"stop": ["x" * 257]}, "invalid_request", "stop", "257 characters"),
        ({"logit_bias": {"99999999": 1}}, "invalid_logit_bias", "logit_bias", "99999999"),
        ({"logit_bias": {"1": 101}}, "invalid_request", "logit_bias.1", "100"),
        ({"top_logprobs": 2}, "invalid_request", "top_logprobs", "logprobs"),
        ({"logit_bias": {"5": 1, "05": -100}}, "invalid_request", "logit_bias", "'05'"),
        ({"logit_bias": {"1": "a"}}, "invalid_request", "logit_bias.1", "number"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "invalid_request", "logit_bias", "1024"),
        ({"stop": [1] * 1000}, "invalid_type", "stop", "list of texts"),
        ({"user": "u" * 70_000}, "invalid_request", "user", "65536 characters"),
        ({"response_format": {"type": "json_schema", "a": [1] * 70_000}}, "invalid_response_format", "response_format", "65536 characters"),
        ({"messages": [1] * 10}, "wrong_type", "messages[0]", "not an object"),
        ({"messages": [1] * 10_001}, "too_many_messages", "messages", "10000"),
        ({"add_special_tokens": True}, "unsupported_parameter", "add_special_tokens", "not supported"),
        ({"n": 17}, "invalid_request", "n", "16"),
        ({"frequency_penalty": 2.1}, "invalid_request", "frequency_penalty", "2"),
    ],
)
def test_a_field_without_effect_here_is_refused_by_name(
    client: openai.OpenAI, given: dict[str, Any], code: str, param: str, said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=ASK, extra_body=given)
    assert (refused.value.code, refused.value.param, said in refused.value.message) == (code, param, True)


@pytest.mark.parametrize("given", [{"user": "u"}, {"store": False}, {"top_k": -1}, {"metadata": {"a": "b"}}, {"modalities": ["text"]}])
def test_a_field_that_changes_no_answer_is_accepted(client: openai.OpenAI, given: dict[str, Any]) -> None:
    assert client.chat.completions.create(model="tiny", messages=ASK, max_tokens=1, extra_body=given).choices


@pytest.mark.parametrize("as_tokens", [False, True])
def test_log_probabilities_of_a_prompt_and_its_answer_are_those_of_transformers(
    client: openai.OpenAI, reference: Any, tokenizer: Any, as_tokens: bool
) -> None:
    ids = tokenizer(TEXT)["input_ids"]
    answer = client.completions.create(
        model="tiny", prompt=ids if as_tokens else TEXT, max_tokens=3, echo=True, logprobs=4, temperature=0, seed=1
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.top_logprobs and found.text_offset
    assert "".join(found.tokens[: len(ids)]) == TEXT
    assert answer.choices[0].text.startswith(TEXT)
    assert [answer.choices[0].text[at:].startswith(token) for at, token in zip(found.text_offset, found.tokens, strict=True)][
        : len(ids)
    ] == [True] * len(ids)
    generated = list(ids)
    for _ in found.tokens[len(ids) :]:
        generated.append(int(reference(generated)[-1].argmax()))
    whole = reference(generated)
    assert found.token_logprobs[0] is None
    for at in range(1, len(found.tokens)):
        assert found.token_logprobs[at] == pytest.approx(float(whole[at - 1, generated[at]]), abs=1e-4)
        best = max(found.top_logprobs[at].values())
        assert best == pytest.approx(float(whole[at - 1].max()), abs=1e-4)
    assert found.token_logprobs[-1] == max(found.top_logprobs[-1].values())  # greedy: the very number


def test_an_echo_without_an_answer_has_the_adapters_log_probabilities(client: openai.OpenAI, tokenizer: Any) -> None:
    asked: Any = {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 0}
    answers = [client.completions.create(model=model, **asked) for model in ("tiny", "acme")]
    both = [answer.choices[0] for answer in answers]
    assert [(choice.text, choice.finish_reason) for choice in both] == [(TEXT, "length")] * 2
    assert answers[0].usage is not None
    assert (answers[0].usage.prompt_tokens, answers[0].usage.completion_tokens) == (len(tokenizer(TEXT)["input_ids"]), 0)
    of_base, of_adapter = (choice.logprobs.token_logprobs[1:] for choice in both if choice.logprobs and choice.logprobs.token_logprobs)
    assert of_base != of_adapter


def test_chat_has_log_probabilities_of_each_token_streamed_or_not(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": ASK, "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content
    pieces = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**asked, stream=True)]
    streamed = [token for piece in pieces if piece for token in piece.content or ()]
    assert [t.model_dump() for t in streamed] == [t.model_dump() for t in whole.logprobs.content]
    assert len(streamed) == 5
    for token in streamed:
        assert (len(token.top_logprobs), token.logprob) == (3, max(one.logprob for one in token.top_logprobs))
        assert token.bytes is not None
        assert token.token == text_of(bytes(token.bytes))


def test_an_answer_that_ends_at_once_has_the_log_probability_of_its_end(client: openai.OpenAI, tokenizer: Any) -> None:
    """A harness drops the last entry, and would lose a token of the prompt if the end had none."""
    end = tokenizer.eos_token_id
    answer = client.completions.create(
        model="tiny", prompt=TEXT, max_tokens=1, echo=True, logprobs=1, temperature=0, logit_bias={str(end): 100}
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.tokens
    assert (answer.choices[0].finish_reason, len(found.tokens)) == ("stop", len(tokenizer(TEXT)["input_ids"]) + 1)


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_a_bias_is_added_to_the_tokens_own_score(client: openai.OpenAI, reference: Any, tokenizer: Any, share: float) -> None:
    scores = reference(tokenizer(TEXT)["input_ids"])[-1]
    other = next(i for i in scores.argsort().tolist() if tokenizer.decode([i]).isalnum())
    gap = float(scores.max() - scores[other])
    assert 0.01 < gap < 90
    biased = client.completions.create(model="tiny", prompt=TEXT, max_tokens=1, temperature=0, logit_bias={str(other): share * gap})
    assert (biased.choices[0].text == tokenizer.decode([other])) == (share > 1)


def test_a_bias_forbids_a_token(client: openai.OpenAI, reference: Any, tokenizer: Any) -> None:
    likeliest, next_ = reference(tokenizer(TEXT)["input_ids"])[-1].topk(2)[1].tolist()
    asked: Any = {"model": "tiny", "prompt": TEXT, "max_tokens": 1, "temperature": 0, "logprobs": 0}
    found = client.completions.create(**asked, logit_bias={str(likeliest): -100}).choices[0].logprobs
    assert found is not None and found.token_logprobs
    assert found.token_logprobs[0] == pytest.approx(float(reference(tokenizer(TEXT)["input_ids"])[-1, next_]), abs=1e-4)


def test_a_chosen_token_is_listed_beside_a_likelier_one(client: openai.OpenAI, reference: Any, tokenizer: Any) -> None:
    scores = reference(tokenizer(TEXT)["input_ids"])[-1]
    unlikely = int(scores.argmin())
    asked: Any = {"model": "tiny", "prompt": TEXT, "max_tokens": 1, "temperature": 0, "logprobs": 1}
    found = client.completions.create(**asked, logit_bias={str(unlikely): 100}).choices[0].logprobs
    assert found is not None and found.top_logprobs
    assert sorted(found.top_logprobs[0].values()) == pytest.approx([float(scores.min()), float(scores.max())], abs=1e-4)


def test_a_bias_on_the_first_token_beyond_the_vocabulary_is_refused(client: openai.OpenAI, base: Path) -> None:
    size = json.loads((base / "config.json").read_text())["vocab_size"]
    asked: Any = {"model": "tiny", "prompt": TEXT, "max_tokens": 1}
    assert client.completions.create(**asked, logit_bias={str(size - 1): 1}).choices
    with pytest.raises(openai.BadRequestError, match=f"ends at {size - 1}") as refused:
        client.completions.create(**asked, logit_bias={str(size): 1})
    assert (refused.value.code, refused.value.param) == ("invalid_logit_bias", "logit_bias")


def test_offsets_of_a_generated_text_are_in_characters(client: openai.OpenAI) -> None:
    """The second byte of a character begins where the first does."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "\u00e9a\u00e9b"}}}
    choice = client.completions.create(model="tiny", prompt=TEXT, max_tokens=20, logprobs=0, extra_body={"response_format": form}).choices[
        0
    ]
    assert choice.text == '"\u00e9a\u00e9b"'
    assert choice.logprobs is not None and choice.logprobs.text_offset
    assert choice.logprobs.text_offset[:8] == [0, 1, 1, 2, 3, 3, 4, 5]


def test_max_completion_tokens_counts_where_both_limits_are_given(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=2, max_completion_tokens=5, logit_bias={"64": 100})
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "length")


def test_a_bias_forces_a_token(client: openai.OpenAI, tokenizer: Any) -> None:
    plain = client.completions.create(model="tiny", prompt=TEXT, max_tokens=1, temperature=0, logprobs=0).choices[0].logprobs
    assert plain is not None and plain.tokens
    chosen = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(plain.tokens[0])[0])
    wanted = next(i for i in range(5, 300) if i != chosen and len(tokenizer.decode([i]).strip()) == 1)
    forced = client.completions.create(model="tiny", prompt=TEXT, max_tokens=3, temperature=0, logit_bias={str(wanted): 100})
    assert forced.choices[0].text == tokenizer.decode([wanted] * 3)


@pytest.mark.parametrize(("frequency", "presence"), [(-0.5, 0.01), (0.1, -0.5)])
def test_penalties_are_those_of_their_definition(
    client: openai.OpenAI, reference: Any, tokenizer: Any, frequency: float, presence: float
) -> None:
    ids, generated = tokenizer(TEXT)["input_ids"], list[int]()
    for _ in range(24):
        scores = reference([*ids, *generated])[-1].clone()
        for token in set(generated):
            scores[token] -= frequency * generated.count(token) + presence
        generated.append(int(scores.argmax()))
    asked: Any = {"model": "tiny", "prompt": TEXT, "max_tokens": 24, "temperature": 0}
    penalized = client.completions.create(**asked, frequency_penalty=frequency, presence_penalty=presence).choices[0].text
    assert penalized == tokenizer.decode(generated)
    assert len(set(generated)) < len(generated), "no token came twice: the penalties were not tried"
    assert penalized != client.completions.create(**asked).choices[0].text


def test_n_answers_differ_and_come_again_with_their_seed(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": ASK, "max_tokens": 8, "n": 3, "seed": 7}
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in second.choices]
    assert texts[0] == client.chat.completions.create(**{**asked, "n": 1}).choices[0].message.content
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
        usage = chunk.usage
    assert streamed == texts
    assert usage is not None and first.usage is not None
    assert usage.completion_tokens == first.usage.completion_tokens > 8


def test_each_prompt_of_a_list_is_answered_as_alone(client: openai.OpenAI, tokenizer: Any) -> None:
    prompts = [TEXT, "Once", "The quick brown fox"]
    alone = [client.completions.create(model="tiny", prompt=p, max_tokens=6, temperature=0).choices[0].text for p in prompts]
    together = client.completions.create(model="tiny", prompt=prompts, max_tokens=6, temperature=0)
    tokens = client.completions.create(model="tiny", prompt=[tokenizer(p)["input_ids"] for p in prompts], max_tokens=6, temperature=0)
    assert [c.text for c in together.choices] == [c.text for c in tokens.choices] == alone


@pytest.mark.parametrize("seed", [3, 2**64 - 1])
def test_each_prompt_of_a_list_has_the_n_answers_that_it_has_alone(client: openai.OpenAI, tokenizer: Any, seed: int) -> None:
    prompts = [TEXT, "Once"]
    asked: Any = {"model": "tiny", "max_tokens": 6, "n": 2, "seed": seed, "echo": True}
    alone = [client.completions.create(prompt=prompt, **asked) for prompt in prompts]
    together = client.completions.create(prompt=prompts, **asked)
    assert [choice.index for choice in together.choices] == list(range(4))
    assert [choice.text for choice in together.choices] == [choice.text for answer in alone for choice in answer.choices]
    assert len({choice.text for choice in together.choices}) == 4
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(len(tokenizer(prompt)["input_ids"]) for prompt in prompts), "once for all n answers"
    assert together.usage.completion_tokens == sum(answer.usage.completion_tokens for answer in alone if answer.usage)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([[1], []], "prompt 1 has no token"),
        ([10**7], "tokens outside"),
        (["a"] * 129, "129 answers"),
        ([[1] * 512], "prompt has 512 tokens"),
        ([], "prompt must be"),
        (["a"] * 9 + [1], "prompt must be"),
        ([[1], ["a"]], "prompt must be"),
        ([True], "prompt must be"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_refused(client: openai.OpenAI, prompt: Any, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    assert refused.value.param == "prompt"


def test_answers_to_all_prompts_are_counted_together(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="144 answers") as refused:
        client.completions.create(model="tiny", prompt=["a"] * 9, n=16, max_tokens=1)
    assert refused.value.param == "prompt"


def test_constrained_answers_have_the_models_own_log_probabilities(client: openai.OpenAI) -> None:
    asked: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}
    choice = client.chat.completions.create(model="tiny", messages=ASK, response_format=asked, logprobs=True, n=2, seed=1).choices
    for one in choice:
        assert one.message.content in ('"yes"', '"no"')
        assert one.logprobs is not None and one.logprobs.content
        assert all(math.isfinite(token.logprob) and token.logprob < 0 for token in one.logprobs.content)


@pytest.mark.parametrize(("kind", "neutral"), [("chat", False), ("completion", True)])
def test_value_of_special_tokens_that_is_the_default_is_accepted(client: openai.OpenAI, kind: str, neutral: bool) -> None:
    own: Any = {"messages": ASK} if kind == "chat" else {"prompt": "a"}
    create: Any = client.chat.completions.create if kind == "chat" else client.completions.create
    assert create(model="tiny", max_tokens=1, extra_body={"add_special_tokens": neutral}, **own).choices
    with pytest.raises(openai.BadRequestError, match="add_special_tokens"):
        create(model="tiny", max_tokens=1, extra_body={"add_special_tokens": not neutral}, **own)


@pytest.mark.parametrize(
    ("body", "code", "param", "said"),
    [
        (b'{"model": "tiny", x', "invalid_json", None, "at character 18"),
        (b"[" * 100_000, "invalid_request", None, "parsing the body"),
        (b'{"\\ud800": 1}', "unknown_parameter", "\\ud800", "not a field"),
    ],
)
def test_body_that_is_not_read_is_refused_in_openais_form(
    client: openai.OpenAI, body: bytes, code: str, param: str | None, said: str
) -> None:
    import httpx

    headers = {**HEADERS, "content-type": "application/json"}
    answer = httpx.post(f"{client.base_url}completions", content=body, headers=headers, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"], said in error["message"]) == (400, code, param, True)


def test_refusal_has_no_words_of_the_parser(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="a", max_tokens=0)
    assert refused.value.param == "max_tokens"
    assert "Value error" not in refused.value.message
