"""The real lm-evaluation-harness through the gateway gets the numbers that it gets from transformers directly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from control_plane.api.app import create_app
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from tests.support.models.tiny_model import build_tiny_model
from tests.support.servers.inference_server import TOKEN, free_port, inference_server

pytestmark = pytest.mark.slow
MODEL = "tiny-base"
ITEMS = 24
CHOICE = """
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc}}
  - {{metric: acc_norm}}
"""
GENERATED = """
task: continued
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false, temperature: 0.0}}
metric_list:
  - {{metric: exact_match}}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("harness") / "base")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    words = ["red", "light green", "blue sky", "a dark grey", "yellow", "white"]
    rows = [
        {"question": f"Which colour has thing {n}?", "choices": [words[(n + k) % 6] for k in range(3)], "answer": n % 3}
        for n in range(ITEMS)
    ]
    items = folder / "items.jsonl"
    items.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "colours.yaml").write_text(CHOICE.format(items=items))
    (folder / "continued.yaml").write_text(GENERATED.format(items=items))
    return folder


@pytest.fixture(scope="module")
def served(new_platform: Callable[..., Platform], serve: Callable[[FastAPI], str], base: Path) -> Iterator[tuple[str, str]]:
    """URL of the API, and a tenant's key."""
    with inference_server(base, port=free_port(), name=MODEL) as url:
        platform = new_platform(inference_urls=url, inference_token=TOKEN)
        _, key = tenants.create(platform, f"harness-{uuid.uuid4().hex[:8]}")
        yield f"{serve(create_app(platform))}/v1", key.secret


def evaluated(model: str, arguments: str, tasks: Path, out: Path, *more: str, task: str, key: str = "") -> list[dict[str, Any]]:
    """Each item of `task` as the harness logs it."""
    command = [
        sys.executable, "-m", "lm_eval", "--model", model, "--model_args", arguments, "--tasks", task, "--include_path", str(tasks),
        "--output_path", str(out), "--log_samples", "--device", "cpu", *more,
    ]  # fmt: skip
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": key, "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = out.rglob(f"samples_{task}_*.jsonl")
    return sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda sample: int(sample["doc_id"]))


def of_api(url: str, base: Path, *, tokenized: bool) -> str:
    backend = f"tokenizer_backend=huggingface,tokenizer={base}"
    return f"model={MODEL},base_url={url}/completions,{backend},tokenized_requests={tokenized},max_length=512,num_concurrent=1"


@pytest.mark.parametrize("tokenized", [True, False])
def test_likelihoods_are_those_of_transformers(served: tuple[str, str], base: Path, tasks: Path, tmp_path: Path, tokenized: bool) -> None:
    url, key = served
    direct = evaluated("hf", f"pretrained={base},dtype=float32", tasks, tmp_path / "hf", task="colours")
    ours = evaluated("local-completions", of_api(url, base, tokenized=tokenized), tasks, tmp_path / "api", task="colours", key=key)
    assert len(direct) == len(ours) == ITEMS
    for a, b in zip(direct, ours, strict=True):
        expected, found = ([(float(logprob), greedy) for logprob, greedy in sample["filtered_resps"]] for sample in (a, b))
        assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=1e-3)
        assert [str(one[1]) for one in found] == [str(one[1]) for one in expected]
        assert (b["acc"], b["acc_norm"]) == (a["acc"], a["acc_norm"])


def test_generated_answers_are_those_of_transformers(served: tuple[str, str], base: Path, tasks: Path, tmp_path: Path) -> None:
    url, key = served
    direct = evaluated("hf", f"pretrained={base},dtype=float32", tasks, tmp_path / "hf", task="continued")
    ours = evaluated("local-completions", of_api(url, base, tokenized=False), tasks, tmp_path / "api", task="continued", key=key)
    assert [sample["filtered_resps"] for sample in ours] == [sample["filtered_resps"] for sample in direct]
    assert len({str(sample["filtered_resps"]) for sample in ours}) > 3, "the answers say nothing apart"


def test_chats_are_answered_as_by_transformers(served: tuple[str, str], base: Path, tasks: Path, tmp_path: Path) -> None:
    url, key = served
    chat = "--apply_chat_template"
    direct = evaluated("hf", f"pretrained={base},dtype=float32", tasks, tmp_path / "hf", chat, task="continued")
    arguments = f"model={MODEL},base_url={url}/chat/completions,num_concurrent=1"
    ours = evaluated("local-chat-completions", arguments, tasks, tmp_path / "api", chat, task="continued", key=key)
    assert [sample["filtered_resps"] for sample in ours] == [sample["filtered_resps"] for sample in direct]
