"""Chat templates that render tools, as public families write calls, and tiny models with them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import trl
from tokenizers import AddedToken, Tokenizer

from tests.support.models.tiny_model import build_tiny_model

PUBLIC = Path(trl.__file__).parent / "chat_templates"
"""Templates of public models that trl ships."""
OWN = Path(__file__).parents[2] / "engine/data/tokens/templates"
CONTEXT = 8192
"""Tokens of a byte: room for the tools of a prompt."""
SPECIAL = re.compile(r"<[|\uff5c][^|\uff5c<>{}]+[|\uff5c]>|\[/?[A-Z_]{3,}\]|</s>")
ADDED = re.compile(r"</?tool_call>|</?think>")
_TURNS = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + (m.content or '') }}{% if m.tool_calls %}{{ '@OPEN@' }}"
    "{% for c in m.tool_calls %}{% set name, arguments = c.function.name, c.function.arguments | tojson %}@CALL@"
    "{{ '@NEXT@' if not loop.last }}{% endfor %}{{ '@CLOSE@' }}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _like(start: str, call: str, between: str, end: str) -> str:
    return _TURNS.replace("@OPEN@", start).replace("@CALL@", call).replace("@NEXT@", between).replace("@CLOSE@", end)


MISTRAL = _like(
    "[TOOL_CALLS] [",
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '{"name": "{{ name }}", "arguments": {{ arguments }}, "id": "{{ c.id }}"}',
    ", ",
    "]",
)
DEEPSEEK = _like(
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>{{ name }}\n```json\n{{ arguments }}\n```"
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "\\n",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
GRANITE = _like("<|tool_call|>[", '{"name": "{{ name }}", "arguments": {{ arguments }}}', ", ", "]")
SHIPPED = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "gptoss")
READABLE: Mapping[str, str] = {
    **{name: (OWN / f"{name}.jinja").read_text() for name in ("qwen2_5", "qwen3", "llama3")},
    **{f"public {name}": (PUBLIC / f"{name}.jinja").read_text() for name in SHIPPED},
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "granite": GRANITE,
}
"""By family; those of our own are short, and write calls like the family's."""
UNREADABLE: Mapping[str, str] = {
    f"public {name}": (PUBLIC / f"{name}.jinja").read_text() for name in ("qwen3_6", "glm4moe", "lfm2_2_5", "gemma4")
}
"""Templates that render tools, with calls in XML or in code."""


def build_tool_model(directory: Path, template: str) -> Path:
    """Write a tiny model with `template` and the special tokens that it names."""
    build_tiny_model(directory, template=template)
    file, config = directory / "tokenizer.json", directory / "config.json"
    tokenizer = Tokenizer.from_file(str(file))
    known = set(tokenizer.get_vocab())
    special, added = (sorted(set(kind.findall(template)) - known) for kind in (SPECIAL, ADDED))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    tokenizer.save(str(file))
    size = tokenizer.get_vocab_size()
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": CONTEXT}, indent=1))
    _grow(directory, size)
    return directory


def _grow(directory: Path, size: int) -> None:
    """Give the model an embedding for each token of a larger vocabulary."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    config, file = directory / "config.json", directory / "model.safetensors"
    weights, rng = load_file(file), np.random.default_rng(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = weights[name]
        more = rng.standard_normal((size - len(old), old.shape[1])) * old.std()
        weights[name] = np.concatenate([old, more.astype(old.dtype)])
    save_file(weights, file, metadata={"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": size}, indent=1))
