"""The demo base's template renders tools, and conversations without them as before it did."""

from __future__ import annotations

import json
from pathlib import Path

from core.base_models import Catalogue
from engine.data.schema import Example, Message, ToolCall
from engine.data.tokens.call_form import CallForm
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.data.tokens.loss_mask import IGNORE
from engine.data.tokens.tool_probe import TemplateTools
from tests.engine.data.examples_of import varied_chats

BASE = Path(__file__).parents[2] / "examples" / "demo" / "base_model"
RELEASED = BASE.with_name("base_model_0_1")
"""With the template with which the base was trained and measured (examples/demo/RESULTS.md): that of release 0.1."""
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}


def test_base_of_release_0_1_differs_only_in_its_template() -> None:
    models = Catalogue.load()
    (earlier,) = models.digests_alike("demo-llama-3m")
    before, directory = models.get_local("demo-llama-3m", earlier)
    assert (before.digest, directory) == (earlier, RELEASED)
    now = models.get("demo-llama-3m")
    assert now.tokenizer_digest == before.tokenizer_digest and now.template_digest != before.template_digest
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (BASE / name).read_bytes() == (RELEASED / name).read_bytes()


def test_conversation_without_tools_is_rendered_as_when_the_base_was_measured() -> None:
    now, before = ChatTokenizer.load(BASE), ChatTokenizer.load(RELEASED)
    examples = varied_chats(300, seed=3, weights=True)
    for one, other in zip(now.encode_batch(examples, max_seq_len=10**6), before.encode_batch(examples, max_seq_len=10**6), strict=True):
        assert (one.text, one.input_ids.tolist(), one.labels.tolist()) == (other.text, other.input_ids.tolist(), other.labels.tolist())
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    assert now.render_turns(turns) == before.render_turns(turns)


def test_loss_covers_calls_and_the_end_of_the_turn_and_evaluations_read_them_back() -> None:
    tokenizer = ChatTokenizer.load(BASE)
    assert tokenizer.tools == TemplateTools(definitions=True, calls=True, results=True)
    calls = tuple(ToolCall(name="weather", arguments={"reason": "asked", "city": city}) for city in ("Lima", 'K"öln'))
    turn = Message(role="assistant", content="Let me look.", tool_calls=calls)
    encoded = tokenizer.encode(
        Example(kind="chat", messages=(Message(role="user", content="Rain?"), turn), tools=(TOOL,)), max_seq_len=10**6
    )
    trained = tokenizer.decode([t for t in encoded.labels.tolist() if t != IGNORE])
    assert trained.startswith("Let me look.\n<tool_call>") and trained.endswith("</tool_call><|im_end|>")
    assert json.dumps(TOOL) in encoded.text and json.dumps(TOOL) not in trained
    form = CallForm.of_model(BASE)
    assert form is not None
    assert [dict(call) for call in form.read(trained)] == [{"name": call.name, "arguments": call.arguments} for call in calls]


def test_results_of_parallel_calls_share_one_turn() -> None:
    call, result = ToolCall(name="weather", arguments={}), Message(role="tool", content="rain", name="weather")
    messages = (Message(role="user", content="Rain?"), Message(role="assistant", tool_calls=(call, call)), result, result)
    example = Example(kind="chat", messages=(*messages, Message(role="assistant", content="Yes.")))
    text = ChatTokenizer.load(BASE).encode(example, max_seq_len=10**6).text
    assert "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>" in text
