"""Every method goes the whole way: from rows of its own shape through training, evaluation and its gate to a model with a name."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from tests.journey.conftest import Stack
from tests.journey.method_rows import write_rows
from tests.support.jobs.followed_jobs import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EVAL = {"max_items": 24, "max_new_tokens": 24}
"""Forty steps of SFT teach the style of the answers and not their content, so perplexity decides there instead of the answers."""
PREFERENCE = ("validation/preference_accuracy", "validation/preference_margin", "base/validation/preference_accuracy")
PERPLEXITY = ("validation/perplexity", "base/validation/perplexity")
WAY = [
    pytest.param("sft", "lora", 40, PERPLEXITY, id="sft"),
    pytest.param("cpt", "lora", 30, PERPLEXITY, id="cpt"),
    pytest.param("dpo", "lora", 20, PREFERENCE, id="dpo"),
    pytest.param("orpo", "lora", 20, PREFERENCE, id="orpo"),
    pytest.param("kto", "lora", 20, PREFERENCE, id="kto"),
    pytest.param("simpo", "lora", 20, PREFERENCE, id="simpo"),
    pytest.param("sft", "qlora", 40, PERPLEXITY, id="sft-qlora"),
    pytest.param("sft", "full", 40, PERPLEXITY, id="sft-full"),
]


@dataclass(frozen=True)
class Customer:
    client: openai.OpenAI
    key: str
    stack: Stack
    rows: Path
    """Tickets."""

    def submit(self, method: str, adapter: str, steps: int, scratch: Path) -> Any:
        file = self.client.files.create(file=write_rows(method, self.rows, scratch / f"{method}.jsonl"), purpose="fine-tune")
        assert file.status == "processed", file.status_details
        name = "supervised" if method == "sft" else method
        asked: Any = {"type": name, name: {"hyperparameters": {"n_epochs": 3, "max_steps": steps}}}
        return self.client.fine_tuning.jobs.create(
            model="demo-llama-3m", training_file=file.id, suffix=f"{method}-{adapter}", seed=7, method=asked,
            extra_body={"adapter": adapter, "eval_config": EVAL | ({"skip": ["task"]} if method == "sft" else {})},
        )  # fmt: skip

    def ended(self, job_id: str) -> Any:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            job = self.client.fine_tuning.jobs.retrieve(job_id)
            if job.status in ("succeeded", "failed", "cancelled") and job.finished_at:
                return job
            time.sleep(0.5)
        pytest.fail(f"job {job_id} did not end")

    def adapter(self, adapter_id: str) -> dict[str, Any]:
        answer = requests.get(
            f"{self.stack.endpoints['api']}/v1/adapters/{adapter_id}", headers={"Authorization": f"Bearer {self.key}"}, timeout=10
        )
        return dict(answer.json())


@pytest.fixture(scope="module")
def customer(stack: Stack, tickets: Path) -> Customer:
    key = json.loads(stack.ft("admin", "tenants", "create", "methods", "--tier", "premium", "--json").stdout)["api_key"]
    return Customer(stack.client(key), key, stack, tickets)


@pytest.fixture(scope="module")
def submitted(customer: Customer, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """All jobs, at once: the queue places them as there is room."""
    scratch = tmp_path_factory.mktemp("rows")
    asked: list[Any] = [p.values for p in WAY]
    return {(method, adapter): customer.submit(method, adapter, steps, scratch).id for method, adapter, steps, _ in asked}


@pytest.mark.parametrize(("method", "adapter", "steps", "scores"), WAY)
def test_a_method_goes_the_whole_way(
    customer: Customer, submitted: dict[tuple[str, str], str], method: str, adapter: str, steps: int, scores: tuple[str, ...]
) -> None:
    job = customer.ended(submitted[method, adapter])
    assert job.status == "succeeded", job.error
    assert job.method.type == ("supervised" if method == "sft" else method)
    assert (job.adapter, job.step) == (adapter, steps)
    assert job.fine_tuned_model.startswith(f"ft:demo-llama-3m:methods:{method}-{adapter}:")
    record = customer.adapter(job.adapter_id)
    seen = {k: round(v, 4) for k, v in record["metrics"].items()}
    sys.stdout.write(f"{method} {adapter} {job.finished_at - job.created_at} s {job.hyperparameters} {seen}\n")
    assert not set(scores) - set(record["metrics"])
    assert record["eval_passed"]
    if adapter == "full":
        assert (record["type"], record["stage"], record["observed"]) == ("full_model", "draft", "unloaded")
        return
    assert (record["type"], record["stage"], record["observed"]) == ("lora_adapter", "production", "loaded")
    ask: Any = {"messages": [{"role": "user", "content": "My router arrived broken."}], "max_tokens": 16, "temperature": 0}
    assert customer.client.chat.completions.create(model=job.fine_tuned_model, **ask).choices[0].message.content


def test_a_whole_model_is_exported_and_served_once_it_is_promoted(
    customer: Customer, submitted: dict[tuple[str, str], str], tmp_path: Path
) -> None:
    job = customer.ended(submitted["sft", "full"])
    assert job.status == "succeeded", job.error
    ask: Any = {"model": job.fine_tuned_model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, "temperature": 0}
    with pytest.raises(openai.ConflictError, match="is draft and not served"):
        customer.client.chat.completions.create(**ask)
    customer.stack.ft("promote", job.fine_tuned_model, key=customer.key)
    until(lambda: customer.adapter(job.adapter_id)["observed"] == "loaded", timeout_s=300)
    assert customer.client.chat.completions.create(**ask).choices[0].message.content
    customer.client.models.delete(job.fine_tuned_model)
    with pytest.raises(openai.ConflictError, match="is deprecated and not served"):
        customer.client.chat.completions.create(**ask)
    for form, wanted in (("adapter", "model.safetensors"), ("merged", "tokenizer.json")):
        customer.stack.ft("export", job.fine_tuned_model, "--format", form, "-o", str(tmp_path / form), key=customer.key)
        assert (tmp_path / form / wanted).is_file()


def test_rows_of_another_method_are_refused_with_the_method_that_takes_them(customer: Customer, tmp_path: Path) -> None:
    chats = write_rows("sft", customer.rows, tmp_path / "chats.jsonl")
    refused = customer.stack.ft("submit", str(chats), "--method", "dpo", key=customer.key, ok=False)
    assert refused.returncode != 0
    assert "prompt, chosen and rejected" in refused.stderr
    assert "use method sft or cpt" in refused.stderr
