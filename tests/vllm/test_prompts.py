"""vLLM renders what the gateway sends it as training renders the same conversation, token by token."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.adapters.cluster import TRAINED_PROMPTS
from engine.data.conversation import normalize_request, read_request
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from tests.engine.data.tokens.conversations import Kinds, conversation, spelled
from tests.engine.data.tokens.test_prompt_parity import EVERY_FIELD
from tests.vllm.vllm_server import SERVED, Server, build_servable_model

CONTEXT, NUM_CONVERSATIONS = 8192, 150
ASKED = {"return_token_ids": True, "tool_choice": "none"}
"""The server has no parser of calls; tools are rendered all the same."""


@pytest.fixture(scope="module")
def server(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("prompts")
    base = build_servable_model(root / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    (base / "chat_template.jinja").write_text(EVERY_FIELD)
    command = [
        str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(base), "--served-model-name", SERVED, "--host",
        "127.0.0.1", "--dtype", "float32", "--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", str(64 << 20), *TRAINED_PROMPTS,
    ]  # fmt: skip
    made = Server(python=vllm_python, base=base, base_digest="0" * 64, adapters=root, log=root / "vllm.log", env={"FT_ADAPTER_INDEX": ""})
    made.command = [*command, "--port", str(made.port)]
    made.start()
    try:
        made.wait()
        yield made
    finally:
        made.stop()


def test_prompts_have_the_ids_that_training_renders(server: Server) -> None:
    tokenizer, rng, seen = ChatTokenizer.load(server.base), random.Random(3), Counter[str]()
    for _ in range(NUM_CONVERSATIONS):
        made = conversation(rng, Kinds(tools=True, reasoning=True, switch=True))
        has = set(made.has)
        request = normalize_request(spelled(rng, made, messages=made.messages[:-1], has=has))
        answer = server.post("/v1/chat/completions", {**request, "model": SERVED, "max_tokens": 1, **ASKED})
        assert answer.status_code == 200, answer.text
        expected = tokenizer.encode_prompt(read_request(request))
        ids = answer.json()["prompt_token_ids"]
        assert ids == expected, (tokenizer.decode(ids), tokenizer.decode(expected))
        seen.update(has)
    wanted = ("tools", "parallel calls", "reasoning", "names", "control tokens", "kwargs", "no content", "content beside calls")
    assert {feature: seen[feature] for feature in wanted if seen[feature] < 3} == {}
    assert "26 Jul 2024" in tokenizer.decode(expected)
