"""vLLM is started with the parser that reads the calls of the model's chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.adapters.manifests import tool_flags
from tests.support.models.tiny_model import build_tiny_model
from tests.support.models.tool_templates import READABLE, UNREADABLE, build_tool_model

EXPECTED = {
    "qwen2_5": "hermes", "public qwen3": "hermes", "llama3": "llama3_json", "public llama3_1": "llama3_json", "public gptoss": "openai",
    "mistral": "mistral", "deepseek": "deepseek_v3", "granite": "granite", "public qwen3_6": "qwen3_coder", "public glm4moe": "glm45",
    "public gemma4": "gemma4", "public lfm2_2_5": "lfm2",
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_parser_follows_from_a_rendered_call(tmp_path: Path, name: str) -> None:
    directory = build_tool_model(tmp_path / "model", {**READABLE, **UNREADABLE}[name])
    assert tool_flags(directory) == ["--enable-auto-tool-choice", "--tool-call-parser", EXPECTED[name]]


def test_model_whose_calls_no_parser_reads_has_no_tool_flags(tmp_path: Path) -> None:
    assert tool_flags(build_tiny_model(tmp_path / "none")) == []
    assert tool_flags(build_tiny_model(tmp_path / "text", template=None)) == []
    assert tool_flags(build_tiny_model(tmp_path / "broken", template="{{ '")) == []
    assert tool_flags(tmp_path) == tool_flags(None) == []
