"""Dagster's published example of fine-tuning, by its calls of OpenAI's client: two uploads, a job, polling, structured answers.

As published but for ``base_url``, key, model and data (`examples/docs_projects/project_llm_fine_tune` of dagster-io/dagster).
"""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from ft_client.demo import phrases, tickets
from tests.journey.conftest import Stack

MODEL_NAME = "demo-llama-3m"
ASKED = 24
FIELDS: dict[str, Any] = {
    "product": {"type": "string", "enum": list(phrases.PRODUCTS)},
    "category": {"type": "string", "enum": list(phrases.CATEGORIES)},
    "priority": {"type": "string", "enum": list(phrases.PRIORITIES)},
    "order_id": {"type": ["string", "null"], "pattern": "^[0-9]{6}$"},
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def uploaded(client: openai.OpenAI, path: Path) -> str:
    with path.open("rb") as file:
        return client.files.create(file=file, purpose="fine-tune").id


def fine_tuned(client: openai.OpenAI, training_file: str, validation_file: str) -> str:
    created = client.fine_tuning.jobs.create(
        training_file=training_file, validation_file=validation_file, model=MODEL_NAME, suffix="goodreads"
    )
    while (job := client.fine_tuning.jobs.retrieve(created.id).to_dict())["status"] not in ("succeeded", "cancelled", "failed"):
        time.sleep(2)
    assert job["status"] == "succeeded", job["error"]
    return str(job["fine_tuned_model"])


def answer_of(client: openai.OpenAI, model: str, ticket: tickets.Ticket) -> Any:
    completion = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": tickets.SYSTEM_PROMPT}, {"role": "user", "content": ticket.text}],
        response_format={"type": "json_schema", "json_schema": {"name": "ticket", "schema": SCHEMA, "strict": True}},
    )
    content = completion.choices[0].message.content
    assert content is not None
    return json.loads(content)


def test_dagsters_example_runs_as_it_is_published(stack: Stack, tmp_path: Path) -> None:
    made = json.loads(stack.ft("admin", "tenants", "create", f"t-{secrets.token_hex(4)}", "--tier", "standard", "--json").stdout)
    client = stack.client(made["api_key"])
    for name, text in tickets.files().items():
        (tmp_path / name).write_text(text)
    files = [uploaded(client, tmp_path / name) for name in (tickets.TICKETS, tickets.HOLDOUT)]
    tuned = fine_tuned(client, *files)
    _, holdout = tickets.make_dataset()
    asked = [ticket for ticket in holdout if not ticket.unseen][:ASKED]
    right: dict[str, int] = {}
    for model in (tuned, MODEL_NAME):
        answers = [answer_of(client, model, ticket) for ticket in asked]
        assert all(answer[name] in FIELDS[name]["enum"] for answer in answers for name in ("product", "category", "priority"))
        right[model] = sum(answer["category"] == ticket.category for answer, ticket in zip(answers, asked, strict=True))
    assert right[tuned] > right[MODEL_NAME], right
