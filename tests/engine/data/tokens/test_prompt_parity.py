"""A conversation has the same token ids as a trained prompt and as a request to the chat endpoint, however either is spelled."""

from __future__ import annotations

import json
import logging
import os
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from core.errors import InvalidRequest
from engine.data.conversation import normalize_request, read_request
from engine.data.schema import canonical, parse_canonical
from engine.data.shapes import to_example
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from resources.inference.schemas import ChatRequest
from tests.engine.data.tokens.conversations import Conversation, Kinds, conversation, spelled
from tests.engine.data.tokens.test_templates import FAMILIES, build
from tests.engine.data.tokens.test_tokens import TOOLS_TEMPLATE, with_template

DEMO = Path(__file__).parents[4] / "examples" / "demo" / "base_model"
EVERY_FIELD = """{{- '<|im_start|>system\\n' + strftime_now('%d %b %Y') }}
{%- if enable_thinking is defined %}{{- ' thinking: ' ~ enable_thinking }}{%- endif %}
{%- if tools %}{{- ' ' + (tools | tojson) }}{%- endif %}{{- '<|im_end|>' }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.name %}{{- ' from ' + message.name }}{%- endif %}
    {%- if message.tool_call_id %}{{- ' for ' + message.tool_call_id }}{%- endif %}
    {{- '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {%- if message.reasoning_content %}{{- '(' + message.reasoning_content + ') ' }}{%- endif %}
            {{- message.content }}
            {%- for call in message.tool_calls or [] %}{{- ' ' + (call | tojson) }}{%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""A template that writes every field there is, so that none can be lost unseen."""
PLAIN = Kinds(tools=False)
KINDS: dict[str, Kinds] = {
    "chatml": PLAIN,
    "chatml_marked": PLAIN,
    "llama3": Kinds(tools=True, most_calls=1, content_with_calls=False),
    "llama3_marked": PLAIN,
    "mistral": Kinds(tools=False, system=False),
    "mistral_marked": Kinds(tools=False, system=False),
    "qwen2_5": Kinds(tools=True),
    "qwen3": Kinds(tools=True, reasoning=True, switch=True),
    "tiny": PLAIN,
    "calls": Kinds(tools=True),
    "demo": Kinds(tools=True),
    "every_field": Kinds(tools=True, reasoning=True, switch=True),
}
EVERYWHERE = ("names", "several turns", "unicode", "parts", "nulls")
NUM_FAST, NUM_SLOW = 60, int(os.environ.get("FT_PARITY_CONVERSATIONS", "10000"))
"""Conversations for each template; the slow test logs what they had (``-o log_cli=true --log-cli-level=INFO``)."""
Load = Callable[[str], ChatTokenizer]
log = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, merging_model: Path) -> Load:
    root = tmp_path_factory.mktemp("parity")

    @cache
    def made(name: str) -> ChatTokenizer:
        if name in FAMILIES:
            return ChatTokenizer.load(build(root / name, name))
        if name in ("calls", "every_field"):
            template = TOOLS_TEMPLATE if name == "calls" else EVERY_FIELD
            return ChatTokenizer.load(with_template(merging_model, root / name, template))
        return ChatTokenizer.load(tiny_model if name == "tiny" else DEMO)

    return made


def trained(tokenizer: ChatTokenizer, row: dict[str, object]) -> list[int] | str:
    """Ids of a row as a pack has them; the code of its refusal if it is refused."""
    example, problems = to_example(json.loads(json.dumps(row)), "chat", row=1)
    assert example is not None, problems
    try:
        encoded = tokenizer.encode(parse_canonical(canonical(example)), max_seq_len=10**6, escape_control_tokens=True)
    except InvalidRequest as error:
        return str(error.code)
    return [int(i) for i in encoded.input_ids]


def served(tokenizer: ChatTokenizer, request: dict[str, object]) -> list[int] | str:
    """Ids of a request's prompt, through the gateway and the embedded server."""
    forwarded = normalize_request(json.loads(json.dumps({"model": "m", **request})))
    body = ChatRequest.model_validate(json.loads(json.dumps(forwarded)))
    read = read_request({**(body.model_extra or {}), "messages": body.messages, "tools": body.tools})
    try:
        return tokenizer.encode_prompt(read)
    except InvalidRequest as error:
        return str(error.code)


def compare(tokenizer: ChatTokenizer, made: Conversation, rng: random.Random, seen: Counter[str]) -> None:
    """Counts what the conversation has and how it compares: ``equal``, ``opening`` or ``refused``; fails if it differs."""
    has = set(made.has)
    row = trained(tokenizer, spelled(rng, made, messages=made.messages))
    prompt = served(tokenizer, spelled(rng, made, messages=made.messages[:-1], has=has))
    if isinstance(row, str) or isinstance(prompt, str):
        of_answer = isinstance(row, str) and not isinstance(prompt, str) and row == "reasoning_not_rendered"
        assert of_answer or row == prompt, (row, prompt, made)
        seen[f"refused: {row}"] += 1
        return
    seen.update(has)
    if row[: len(prompt)] == prompt:
        seen["equal"] += 1
        return
    # The prompt closes the reasoning that the answer has: equal up to the start of the answer's turn.
    marks = [at for at, token in enumerate(prompt) if tokenizer.decode([token]) == "<think>"]
    assert made.kwargs == {"enable_thinking": False} and "reasoning" in made.messages[-1] and marks, (row, prompt)
    assert row[: marks[-1]] == prompt[: marks[-1]], (tokenizer.decode(row), tokenizer.decode(prompt))
    seen["opening"] += 1


def run(name: str, tokenizer: ChatTokenizer, count: int, *, seed: int) -> Counter[str]:
    rng, seen = random.Random(seed), Counter[str]()
    for _ in range(count):
        compare(tokenizer, conversation(rng, KINDS[name]), rng, seen)
    return seen


def check_shares(name: str, seen: Counter[str], count: int) -> None:
    """Guards against conversations that have nothing of what is compared."""
    kinds = KINDS[name]
    wanted = dict.fromkeys(EVERYWHERE, 0.1)
    wanted |= {"tools": 0.3, "calls": 0.2, "results": 0.2, "no content": 0.05, "call as answer": 0.03} if kinds.tools else {}
    wanted |= {"parallel calls": 0.1} if kinds.tools and kinds.most_calls > 1 else {}
    wanted |= {"content beside calls": 0.05} if kinds.tools and kinds.content_with_calls else {}
    wanted |= {"reasoning": 0.1, "kwargs": 0.1} if kinds.reasoning else {}
    wanted |= {"developer": 0.1} if kinds.system else {}
    assert seen["equal"] > 0.8 * count, seen
    assert {feature for feature, share in wanted.items() if seen[feature] < share * count} == set(), seen


@pytest.mark.parametrize("name", KINDS)
def test_request_has_the_ids_of_the_trained_prompt(load: Load, name: str) -> None:
    check_shares(name, run(name, load(name), NUM_FAST, seed=5), NUM_FAST)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", KINDS)
def test_ten_thousand_requests_have_the_ids_of_their_trained_prompts(load: Load, name: str) -> None:
    seen = run(name, load(name), NUM_SLOW, seed=17)
    log.info("%s: %s", name, dict(seen))
    check_shares(name, seen, NUM_SLOW)
