"""A small file from each of the platforms and trainers that people come from, in its own format and by its own settings, becomes a job."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.docs.moving_rows import ROWS, many
from tests.journey.conftest import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EVAL = {"skip": ["golden", "task", "perplexity", "safety"], "max_items": 4, "max_new_tokens": 8}
"""Three steps teach nothing that a gate would accept; what is tested is the way."""
SHORT = {"n_epochs": 1, "max_steps": 3}
FROM = {
    ("OpenAI", 0): {"method": {"type": "supervised", "supervised": {"hyperparameters": {**SHORT, "batch_size": "auto"}}}},
    ("Together", 0): {"hyperparameters": {**SHORT, "learning_rate": 1e-4, "warmup_ratio": 0.1, "train_on_inputs": False}},
    ("Axolotl", 0): {"hyperparameters": {**SHORT, "rank": 8, "alpha": 16, "max_seq_len": 512, "packing": True}},
    ("LLaMA-Factory", 0): {"hyperparameters": SHORT, "lora_rank": 8, "lora_alpha": 16},
    ("TRL", 1): {"method": {"type": "dpo", "dpo": {"hyperparameters": {**SHORT, "beta": 0.2, "loss_type": "sigmoid"}}}},
}
"""A row of docs/moving.md, and the settings that its section maps."""


@pytest.fixture(scope="module")
def ended(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    """The jobs, submitted at once and each at its end."""
    key = json.loads(stack.ft("admin", "tenants", "create", "moving", "--tier", "standard", "--json").stdout)["api_key"]
    client, directory = stack.client(key), tmp_path_factory.mktemp("moving")
    jobs = {}
    for which, body in FROM.items():
        path = Path(directory / f"{which[0]}.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in many(ROWS[which], 120)))
        file = client.files.create(file=path, purpose="fine-tune")
        assert file.status == "processed", file.status_details
        asked = {"auto_promote": False, "eval_config": EVAL, **body}
        jobs[which] = client.fine_tuning.jobs.create(model="demo-llama-3m", training_file=file.id, seed=7, extra_body=asked)
    deadline = time.monotonic() + 800
    while time.monotonic() < deadline:
        found = {which: client.fine_tuning.jobs.retrieve(job.id) for which, job in jobs.items()}
        if all(job.finished_at for job in found.values()):
            return found
        time.sleep(1)
    pytest.fail(f"not ended: {[(which, job.status) for which, job in found.items()]}")


@pytest.mark.parametrize("which", FROM, ids=lambda which: which[0])
def test_a_file_from_elsewhere_is_trained_on_with_the_settings_that_map(ended: dict[tuple[str, int], Any], which: tuple[str, int]) -> None:
    job = ended[which]
    assert job.status == "succeeded", job.error
    assert job.step == 3
    assert job.fine_tuned_model
