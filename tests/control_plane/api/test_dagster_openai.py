"""Dagster's published example of fine-tuning through its OpenAI resource: the same assets, with another ``base_url`` and model."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from dagster import (
    AssetCheckExecutionContext,
    AssetCheckResult,
    AssetExecutionContext,
    AssetSelection,
    DagsterInstance,
    FilesystemIOManager,
    MaterializeResult,
    ResourceParam,
    asset,
    asset_check,
    materialize,
)
from dagster_openai import OpenAIResource
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.serving.tables import deployments
from control_plane.tenants.rules import Tenant
from tests.support.jobs.finished_job import finish

MODEL_NAME = "tiny-base"
POLL_S = 0.05
CATEGORIES = ("fantasy", "history", "poetry")


def prompt(title: str, category: str | None) -> dict[str, Any]:
    asked = [{"role": "system", "content": "Name the category of a book."}, {"role": "user", "content": f"What is {title}?"}]
    return {"messages": asked if category is None else [*asked, {"role": "assistant", "content": category}]}


def written(path: Path, places: range) -> str:
    with path.open("w") as out:
        for i in places:
            out.write(json.dumps(prompt(f"Book {i} of shelf {i * 7919}", CATEGORIES[i % 3])) + "\n")
    return str(path)


@asset
def training_file(tmp: ResourceParam[str]) -> str:
    return written(Path(tmp) / "training.jsonl", range(120))


@asset
def validation_file(tmp: ResourceParam[str]) -> str:
    return written(Path(tmp) / "validation.jsonl", range(200, 240))


def uploaded(context: AssetExecutionContext, openai: OpenAIResource, path: str) -> str:
    with openai.get_client(context) as client, Path(path).open("rb") as file:
        response = client.files.create(file=file, purpose="fine-tune")
    return response.id


@asset
def upload_training_file(context: AssetExecutionContext, openai: OpenAIResource, training_file: str) -> str:
    return uploaded(context, openai, training_file)


@asset
def upload_validation_file(context: AssetExecutionContext, openai: OpenAIResource, validation_file: str) -> str:
    return uploaded(context, openai, validation_file)


@asset
def fine_tuned_model(
    context: AssetExecutionContext, openai: OpenAIResource, upload_training_file: str, upload_validation_file: str
) -> MaterializeResult[str]:
    with openai.get_client(context) as client:
        created = client.fine_tuning.jobs.create(
            training_file=upload_training_file, validation_file=upload_validation_file, model=MODEL_NAME, suffix="goodreads"
        )
        while (job := client.fine_tuning.jobs.retrieve(created.id)).status not in ("succeeded", "failed", "cancelled"):
            time.sleep(POLL_S)
    assert job.status == "succeeded", job.error
    return MaterializeResult(value=job.fine_tuned_model, metadata={"model_name": job.fine_tuned_model, "job": job.id})


@asset_check(asset=fine_tuned_model)
def fine_tuned_model_accuracy(
    context: AssetCheckExecutionContext, openai: OpenAIResource, fine_tuned_model: str
) -> AssetCheckResult:  # fmt: skip
    right: dict[str, int] = {}
    with openai.get_client(context) as client:
        for model in (fine_tuned_model, MODEL_NAME):
            answers = [client.chat.completions.create(model=model, **prompt(f"Book {i}", None)) for i in range(3)]
            right[model] = sum(a.choices[0].message.content == CATEGORIES[i] for i, a in enumerate(answers))
    return AssetCheckResult(passed=right[fine_tuned_model] > right[MODEL_NAME], metadata={"right": right})


class InferenceServer(httpx.AsyncBaseTransport):
    """Answers as a server would whose base knows nothing and whose adapters know the categories."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        number = int(asked["messages"][-1]["content"].split()[3].rstrip("?"))
        said = CATEGORIES[number % 3] if asked["model"].startswith("ft:") else "a book"
        message = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": asked["model"], "choices": [message], "usage": usage}
        return httpx.Response(200, json=answer)


def served(platform: Platform, adapter_id: str) -> None:
    """The server above has the adapter."""
    state = {"desired": "loaded", "observed": "loaded", "updated_at": platform.clock()}
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(deployments).values(adapter_id=adapter_id, name=adapter_id, **state))


@pytest.fixture
def trained(platform: Platform, tenant: Tenant) -> Iterator[None]:
    """Every job of the tenant is brought through its states to success, as the control plane would with a trainer."""
    over = threading.Event()

    def follow() -> None:
        while not over.wait(POLL_S):
            with platform.engine.connect() as conn:
                waiting = sa.select(jobs.c.id).where(jobs.c.tenant_id == tenant.id, jobs.c.state == "validating")
                for id_ in conn.execute(waiting).scalars().all():
                    served(platform, finish(platform, tenant.id, id_))

    thread = threading.Thread(target=follow)
    thread.start()
    yield
    over.set()
    thread.join()


def test_dagsters_example_needs_only_another_base_url(
    platform: Platform, api_key: str, serve: Callable[[ASGIApp], str], tmp_path: Path, trained: None
) -> None:
    url = serve(create_app(platform, transport=InferenceServer()))
    openai = OpenAIResource(api_key=api_key, base_url=f"{url}/v1")
    kept = FilesystemIOManager(base_dir=str(tmp_path))
    resources = {"openai": openai, "tmp": str(tmp_path), "io_manager": kept}
    assets = [training_file, validation_file, upload_training_file, upload_validation_file, fine_tuned_model, fine_tuned_model_accuracy]
    with DagsterInstance.ephemeral() as instance:
        done = materialize(assets, resources=resources, instance=instance, selection=AssetSelection.assets(*assets[:5]).without_checks())
        name = done.output_for_node("fine_tuned_model")
        assert name.startswith("ft:tiny-base:")
        # A run of its own: in one process the resource's client reports to the first asset that asked for it.
        checks = AssetSelection.checks(fine_tuned_model_accuracy)
        (checked,) = materialize(assets, resources=resources, instance=instance, selection=checks).get_asset_check_evaluations()
    assert checked.passed, checked.metadata
