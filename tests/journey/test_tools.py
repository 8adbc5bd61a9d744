"""From 300 rows with tool calls to an adapter that calls tools, on the real processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.journey.conftest import Stack
from tests.journey.test_upload_to_answer import wait_for
from tests.support.models.tool_rows import SCHEMAS, TOOLS, write_tool_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
EPOCHS: Any = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3, "max_seq_len": 1024}}}
SKIPPED = {"eval_config": {"skip": ["golden", "perplexity"], "max_items": 12, "max_new_tokens": 60}}
SEEN = 8
"""Questions that are asked: enough for some with a call under `auto`."""


def test_rows_with_tool_calls_train_an_adapter_that_calls_tools(
    stack: Stack, new_tenant: Callable[[], tuple[str, str]], tmp_path: Path
) -> None:
    _, key = new_tenant()
    client = stack.client(key)
    rows = write_tool_rows(tmp_path / "tools.jsonl")
    file = client.files.create(file=rows, purpose="fine-tune")
    assert file.status == "processed", file.status_details
    job = client.fine_tuning.jobs.create(
        model="demo-llama-3m", training_file=file.id, suffix="tools", method=EPOCHS, seed=7, extra_body=SKIPPED
    )
    done = wait_for(client, job.id, seconds=900)
    assert done.status == "succeeded", done.error
    asked: Any = {"model": done.fine_tuned_model, "tools": list(TOOLS), "max_tokens": 120, "temperature": 0}
    called = 0
    for line in rows.read_text().splitlines()[:SEEN]:
        messages = json.loads(line)["messages"][:1]
        for choice in ("auto", "required"):
            answer = client.chat.completions.create(messages=messages, tool_choice=choice, **asked).choices[0]
            assert "<tool_call>" not in (answer.message.content or "")
            for call in answer.message.tool_calls or ():
                assert (
                    answer.finish_reason == "length"
                    or jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name]) is None
                )
            called += bool(answer.message.tool_calls) if choice == "auto" else 0
            assert choice == "auto" or answer.message.tool_calls
    assert called > SEEN // 2, "the adapter has learned to call tools"
    with client.chat.completions.stream(messages=messages, tool_choice="required", parallel_tool_calls=False, **asked) as stream:
        streamed = stream.get_final_completion().choices[0].message
    (call,) = streamed.tool_calls or ()
    history = [*messages, streamed.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "{}"}]
    assert client.chat.completions.create(messages=history, tool_choice="none", **asked).choices[0].message.content
