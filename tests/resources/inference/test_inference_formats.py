"""What a request demands of its answer's form: enforced by the embedded server, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model
from tests.support.servers.inference_server import HEADERS, TOKEN, free_port, inference_server

if TYPE_CHECKING:
    from resources.inference.engine.grammar import Grammars

MODELS = ("tiny", "ft:acme", "ft:globex")
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CATEGORIES = ["fantasy", "horror", "humor", "adventure", "ya"]
CATEGORY = {
    "type": "object",
    "properties": {"category": {"type": "string", "enum": CATEGORIES}},
    "required": ["category"],
    "additionalProperties": False,
}
TICKET = {
    "type": "object",
    "properties": {
        "product": {"type": ["string", "null"], "maxLength": 8},
        "priority": {"type": "integer", "minimum": 1, "maximum": 5},
        "urgent": {"type": "boolean"},
        "day": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
        "tags": {"type": "array", "items": {"anyOf": [{"const": "ä"}, {"type": "integer", "minimum": 0, "maximum": 99}]}, "maxItems": 3},
        "of": {"$ref": "#/$defs/person"},
    },
    "required": ["product", "priority", "urgent", "day", "tags", "of"],
    "additionalProperties": False,
    "$defs": {
        "person": {"type": "object", "properties": {"name": {"enum": ["Ann", "Bo"]}}, "required": ["name"], "additionalProperties": False}
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("formats")
    base = build_tiny_model(root / "base")
    for seed, name in enumerate(("acme", "globex"), 1):
        build_tiny_adapter(root / name, base, base_name="tiny", seed=seed, scale=1.0)
    return root


@pytest.fixture(scope="module")
def client(place: Path) -> Iterator[openai.OpenAI]:
    with (
        inference_server(place / "base", port=free_port()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as made,
    ):
        for name in ("acme", "globex"):
            body = {"lora_name": f"ft:{name}", "lora_path": str(place / name)}
            made.with_options(base_url=url).post("/v1/load_lora_adapter", cast_to=str, body=body, options={"headers": HEADERS})
        yield made


def schema_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def create(client: openai.OpenAI, model: str = "tiny", prompt: str = "Hello", **options: Any) -> Any:
    settings = {"temperature": 0, "max_tokens": 400, **options}
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": prompt}], **settings).choices[0]


def follows(choice: Any, schema: Any) -> None:
    assert choice.finish_reason == "stop", choice
    jsonschema.validate(json.loads(choice.message.content), schema)


def refused(client: openai.OpenAI, **options: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, **options)
    return caught.value


@pytest.mark.parametrize("model", MODELS)
def test_an_answer_follows_its_schema_greedy_and_drawn(client: openai.OpenAI, model: str) -> None:
    assert create(client, model, max_tokens=20).message.content[:1] != "{", "the model itself would not answer with JSON"
    follows(create(client, model, response_format=schema_format(CATEGORY)), CATEGORY)
    with ThreadPoolExecutor(8) as pool:
        draws = list(
            pool.map(lambda seed: create(client, model, temperature=1.5, seed=seed, response_format=schema_format(TICKET)), range(8))
        )
    for draw in draws:
        follows(draw, TICKET)
    assert len({draw.message.content for draw in draws}) > 4


@pytest.mark.parametrize("backwards", [False, True])
def test_answer_has_its_keys_in_the_order_of_the_schema(client: openai.OpenAI, backwards: bool) -> None:
    """Also in an object within it, whatever order `required` has: fields that reason come before those that conclude."""
    names = ["zone", "answer", "mail", "because"]
    order = names[::-1] if backwards else names
    fields: dict[str, Any] = {name: {"type": "boolean"} for name in order}
    inner = {"type": "object", "properties": fields, "required": sorted(order), "additionalProperties": False}
    schema = {**inner, "properties": {**fields, "mail": inner}}
    answer = create(client, response_format=schema_format(schema), temperature=1.5, seed=5)
    follows(answer, schema)
    found = json.loads(answer.message.content)
    assert (list(found), list(found["mail"])) == (order, order)


def test_rows_of_one_batch_answer_as_they_do_alone_whoever_is_constrained(client: openai.OpenAI) -> None:
    formats = {None: {}, "category": {"response_format": schema_format(CATEGORY)}, "ticket": {"response_format": schema_format(TICKET)}}
    calls = [(model, f"{word} {n}", kind) for n, word in enumerate(("a", "longer prompt", "x")) for model in MODELS for kind in formats]

    def ask(call: tuple[str, str, str | None]) -> str:
        model, prompt, kind = call
        options = {"temperature": 0.7, "seed": 3, "max_tokens": 400, **formats[kind]}
        return str(create(client, model, prompt, **options).message.content)

    alone = [ask(call) for call in calls]
    with ThreadPoolExecutor(len(calls)) as pool:
        assert list(pool.map(ask, calls)) == alone
    for (_, _, kind), answer in zip(calls, alone, strict=True):
        if kind is not None:
            jsonschema.validate(json.loads(answer), CATEGORY if kind == "category" else TICKET)


def test_a_stream_holds_the_same_document(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "ft:acme",
        "messages": [{"role": "user", "content": "Hi"}],
        "response_format": schema_format(TICKET),
        "seed": 1,
    }
    whole = client.chat.completions.create(**options).choices[0]
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    follows(whole, TICKET)


def test_a_json_object_is_one_or_is_cut_at_max_tokens(client: openai.OpenAI) -> None:
    whole, cut = (create(client, response_format={"type": "json_object"}, max_tokens=n) for n in (400, 1))
    assert (whole.finish_reason, type(json.loads(whole.message.content))) == ("stop", dict)
    assert (cut.finish_reason, cut.message.content) == ("length", "{")


def test_a_text_completion_follows_a_schema_too(client: openai.OpenAI) -> None:
    extra = {"response_format": schema_format(CATEGORY)}
    answer = client.completions.create(model="ft:globex", prompt="Book:", max_tokens=60, extra_body=extra)
    assert json.loads(answer.choices[0].text)["category"] in CATEGORIES


class Author(BaseModel):
    name: Literal["Ann", "Bo"]
    year: int | None = Field(ge=1900, le=2030)


class Book(BaseModel):
    category: Literal["fantasy", "horror"]
    authors: list[Author] = Field(max_length=2)


def test_the_clients_parse_returns_the_model_of_the_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": "ft:acme", "messages": [{"role": "user", "content": "Which book?"}], "response_format": Book}
    parsed = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(parsed, Book)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**asked, max_tokens=5)


def test_a_complete_answer_stops_also_on_the_last_token_it_may_have(client: openai.OpenAI) -> None:
    num = len(create(client, response_format=schema_format({"const": "abc"})).message.content)  # a token a byte
    assert num == len('"abc"')
    assert create(client, response_format=schema_format({"const": "abc"}), max_tokens=num).finish_reason == "stop"
    assert create(client, response_format=schema_format({"const": "abc"}), max_tokens=num - 1).finish_reason == "length"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


BAD: dict[str, tuple[Any, str]] = {
    "no schema": ({"type": "json_schema"}, "json_schema must be an object with name and schema, not missing"),
    "no name": ({"type": "json_schema", "json_schema": {"schema": CATEGORY}}, "json_schema.name must be a string, not missing"),
    "a schema that is no object": (schema_format("object"), "json_schema.schema must be a JSON schema, an object, not 'object'"),
    "another format": ({"type": "regex"}, "type 'regex' is not supported; send one of "),
    "no type": ({}, "type missing is not supported"),
    "a type that does not exist": (schema_format({"type": "strin"}), "Invalid type: strin"),
    "properties that are no object": (schema_format({"type": "object", "properties": []}), "cannot be enforced"),
    "a keyword that is not enforced": (schema_format({"type": "array", "uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
    "one that its own options would ignore": (schema_format({"not": {}, "x-guidance": {"lenient": True}}), 'Unimplemented keys: ["not"]'),
    "overlapping alternatives": (schema_format({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf cannot be enforced"),
    "a reference that leads nowhere": (schema_format({"$ref": "#/$defs/x"}), "Pointer '/$defs/x' does not exist"),
    "a reference to another host": (schema_format({"$ref": "http://127.0.0.1:9/x"}), "does not fetch"),
    "a pattern that does not end": (schema_format({"type": "string", "pattern": "("}), "unclosed group"),
    "what no answer can follow": (schema_format({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable schema"),
    "a divisor with too many remainders": (schema_format({"type": "integer", "multipleOf": 1_000_003}), "multipleOf exceeds 10000"),
    "a divisor of many digits": (schema_format({"type": "integer", "multipleOf": 10**400}), "multipleOf exceeds 10000"),
    "a divisor of nothing": (schema_format({"type": "integer", "multipleOf": 0}), "cannot be enforced"),
    "divisors with too many remainders together": (
        schema_format({"type": "integer", "allOf": [{"multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 83}]}),
        "multipleOf exceeds 10000",
    ),
    "a divisor of many decimal places": (
        schema_format({"type": "number", "allOf": [{"multipleOf": 0.00001}, {"multipleOf": 7}]}),
        "multipleOf exceeds 10000",
    ),
    "nesting without end": (schema_format(nested(200)), "recursion limit exceeded"),
    "too many bytes": (schema_format({"enum": [f"{i:04}" for i in range(10_000)]}), "limit 65536"),
    "too many characters": (schema_format({"enum": [f"{i:0200}" for i in range(400)]}), "more than 65536 characters"),
}


def test_a_schema_with_half_of_a_surrogate_pair_is_refused(client: openai.OpenAI) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "response_format": schema_format({"const": "\ud800"})}
    answer = httpx.post(
        f"{client.base_url}chat/completions", content=json.dumps(body), headers={**HEADERS, "content-type": "application/json"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    assert "half of a surrogate pair" in answer.json()["error"]["message"]


def test_usual_multiples_are_enforced(client: openai.OpenAI) -> None:
    prices = {"type": "array", "items": {"type": "number", "multipleOf": 0.05, "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 2}
    answer = json.loads(create(client, response_format=schema_format(prices)).message.content)
    assert [round(price * 100) % 5 for price in answer] == [0, 0]


@pytest.mark.parametrize("case", BAD)
def test_a_format_that_cannot_be_enforced_is_refused_with_the_reason(client: openai.OpenAI, case: str) -> None:
    asked, message = BAD[case]
    error = refused(client, response_format=asked)
    assert (error.code, error.param) == ("invalid_response_format", "response_format")
    assert message in error.message


@pytest.mark.parametrize("field", ["guided_json", "structured_outputs"])
def test_a_constraint_in_vllms_own_fields_is_refused(client: openai.OpenAI, field: str) -> None:
    error = refused(client, extra_body={field: CATEGORY})
    assert (error.code, error.param) == ("unsupported_parameter", field)


@pytest.mark.parametrize(
    "options", [{"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}, {"response_format": {"type": "text"}}]
)
def test_what_demands_nothing_is_answered_as_if_it_were_not_there(client: openai.OpenAI, options: dict[str, Any]) -> None:
    assert create(client, max_tokens=8, **options).message.content == create(client, max_tokens=8).message.content


SPACE, ENDS = 220, (256, 259)
"""Tokens of the tiny model: a space; ``<|endoftext|>`` and ``<|im_end|>``."""


def grammars_of(place: Path) -> Grammars:
    from transformers import AutoTokenizer

    from resources.inference.engine.grammar import Grammars

    tokenizer: Any = AutoTokenizer.from_pretrained(place / "base")
    return Grammars(tokenizer, ends=ENDS, vocabulary=len(tokenizer) + 4)


def allowed_after(place: Path, schema: Any, text: str) -> set[int]:
    """Tokens that may follow `text`, by the masks of one answer."""
    import torch

    grammars = grammars_of(place)
    constraint = grammars.constraint(schema)
    logits = torch.zeros(grammars.vocabulary)
    for token in Tokenizer.from_file(str(place / "base/tokenizer.json")).encode(text).ids:
        assert constraint.mask(logits)[token] == 0, f"{text} follows the schema"
        constraint.take(token)
    return set(torch.isfinite(constraint.mask(logits)).nonzero().flatten().tolist())


def test_an_answer_may_end_where_it_is_complete_and_nowhere_else(place: Path) -> None:
    document = '{"category": "ya"}'
    for cut in range(len(document)):
        assert not set(ENDS) & allowed_after(place, CATEGORY, document[:cut]), document[:cut]
    assert allowed_after(place, CATEGORY, document) == set(ENDS)
    assert set(ENDS) < allowed_after(place, {"type": "integer"}, "12"), "more digits may follow"


def test_whitespace_between_parts_of_an_answer_comes_to_an_end(place: Path) -> None:
    assert SPACE in allowed_after(place, CATEGORY, "{\n" + " " * 12)
    assert SPACE not in allowed_after(place, CATEGORY, "{\n" + " " * 24)


def test_no_special_token_and_no_place_beyond_the_vocabulary_is_part_of_a_string(place: Path) -> None:
    inside = allowed_after(place, {"type": "string"}, '"a')
    assert len(inside) > 90
    assert max(inside) < 256


def test_compiled_schemas_are_kept_and_the_least_used_goes_first(place: Path) -> None:
    grammars = grammars_of(place)
    assert grammars.cached(CATEGORY) is None
    answers = [grammars.constraint(CATEGORY), grammars.cached(CATEGORY), grammars.cached(CATEGORY)]
    assert None not in answers and len({id(answer) for answer in answers}) == 3, "each answer has its own place in the grammar"
    for bound in range(63):
        grammars.constraint({"type": "integer", "maximum": bound})
    assert grammars.cached(CATEGORY) is not None, "64 are kept, and this one was used last"
    grammars.constraint({"type": "boolean"})
    assert grammars.cached({"type": "integer", "maximum": 0}) is None and grammars.cached(CATEGORY) is not None


def test_new_schemas_of_one_tenant_delay_another_by_one_of_them(client: openai.OpenAI) -> None:
    def ask(tenant: str, nth: int, num_fields: int) -> str:
        fields = {f"{tenant}_{nth}_{i}": {"type": "string", "pattern": "^[a-z]{1,30}$"} for i in range(num_fields)}
        schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=1, response_format=schema_format(schema),
            extra_headers={"x-ft-tenant": tenant},
        )  # fmt: skip
        answered.append(tenant)
        return tenant

    answered: list[str] = []
    with ThreadPoolExecutor(17) as pool:
        loud = [pool.submit(ask, "loud", nth, 200) for nth in range(16)]
        wait(loud, return_when=FIRST_COMPLETED)
        pool.submit(ask, "quiet", 0, 1).result()
        assert answered.index("quiet") < 12, answered
