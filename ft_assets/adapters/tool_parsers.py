"""The parser of vLLM that reads the tool calls of a model, found by rendering a call with the model's chat template.

Names are those of vLLM 0.32 (``--tool-call-parser``). A form that none of them reads gives no parser: the server then refuses
`tools`, as vLLM does without ``--enable-auto-tool-choice``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from ft_assets.datasets.tokens.call_form import rendered_call
from ft_assets.datasets.tokens.chat_tokenizer import ChatTokenizer
from ft_assets.errors import FtError

PARSERS: Mapping[str, str] = {
    r"<tool_call>\s*<function=": "qwen3_coder",
    r"<tool_call>\w+\s*<arg_key>": "glm45",
    r"<tool_call>\s*\{": "hermes",
    r"\[TOOL_CALLS\]": "mistral",
    r"<\|tool_call\|>\s*\[": "granite",
    r"<\uff5ctool\u2581calls\u2581begin\uff5c>.*?```json": "deepseek_v3",
    r"<\uff5ctool\u2581calls\u2581begin\uff5c>": "deepseek_v31",
    r"<\|tool_call>call:": "gemma4",
    r"<\|tool_call_start\|>\[": "lfm2",
    r"to=functions\.": "openai",
    r"\s*\{\s*\"name\": *\"\w+\", *\"parameters\"": "llama3_json",
}
"""By the beginning of a call, in order."""


def flags(directory: Path | None) -> list[str]:
    """Returns vLLM's arguments for the tools of a model directory; none if its calls are not read, or its files are not here."""
    parser = None if directory is None or not (directory / "tokenizer.json").is_file() else _parser(directory)
    return [] if parser is None else ["--enable-auto-tool-choice", "--tool-call-parser", parser]


@lru_cache(maxsize=64)
def _parser(directory: Path) -> str | None:
    """Returns the parser of a model directory; its files do not change while a process runs, as its digest is pinned."""
    try:
        text = rendered_call(ChatTokenizer.load(directory))
    except FtError:
        return None  # a template that cannot be used; requests are refused with its fault
    return None if text is None else next((name for pattern, name in PARSERS.items() if re.search(pattern, text, re.DOTALL)), None)
