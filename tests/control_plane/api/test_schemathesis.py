"""The document tells the truth: requests made from it never get a 5xx, an answer that it does not know, or one of another shape."""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import openai
import pytest
import schemathesis
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.errors import InvalidSchema
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from control_plane.tenants.tables import tenants as tenants_table
from core.base_models import Catalogue
from tests.control_plane.api.test_openai_client import rows
from tests.support.jobs.finished_job import finish
from tests.support.jobs.registered_adapter import add_adapter

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance, not_a_server_error]
SEED = 20_260_101
DEMO = Path(__file__).resolve().parents[3] / "examples/demo/base_model"
UNAVAILABLE_HERE = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/adapters/{adapter_id}/server", "/v1/model_routes/{name}/rewrite",
    "/v1/webhook_endpoints", "/v1/webhook_endpoints/{webhook_endpoint_id}", "/v1/webhook_endpoints/{webhook_endpoint_id}/test",
)  # fmt: skip
"""503 may be their true answer where no inference server runs, no cluster is configured, and no webhooks are sent."""


@pytest.fixture(scope="module")
def demo() -> Catalogue:
    """The demo's model, whose tokenizer can be used, under the name that tests know."""
    return Catalogue({"tiny-base": ({"id": "tiny-base", "path": str(DEMO), "license": "Apache-2.0"}, DEMO)})


@pytest.fixture(scope="module")
def served(
    new_platform: Callable[..., Platform], serve: Callable[[ASGIApp], str], demo: Catalogue
) -> tuple[Platform, str]:  # fmt: skip
    platform = replace(new_platform(), models=demo)
    return platform, serve(create_app(platform))


@pytest.fixture
def world(served: tuple[Platform, str]) -> tuple[str, str, dict[str, Any]]:
    """URL and key of a tenant that has one of most things, and their ids by the names that the document gives to parameters."""
    platform, url = served
    made, key = tenants.create(platform, f"t-{uuid.uuid4().hex[:10]}", tier="premium")
    with platform.engine.begin() as conn:
        conn.execute(sa.update(tenants_table).where(tenants_table.c.id == made.id).values(requests_per_minute=10**8))
    return url, key.secret, things(platform, made, url, key.secret)


def things(platform: Platform, tenant: Tenant, url: str, key: str) -> dict[str, Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        files = [client.files.create(file=(f"{i}.jsonl", rows(120 + i)), purpose="fine-tune") for i in range(2)]
        done, waiting = (client.fine_tuning.jobs.create(model="tiny-base", training_file=files[0].id, seed=i) for i in range(2))
        adapter = finish(platform, tenant.id, done.id)
        name = f"ft:tiny-base:{tenant.id}:x:abc"
        add_adapter(platform, tenant.id, name=name, stage="staging", loaded=False)
        checkpoint = client.fine_tuning.jobs.checkpoints.list(done.id).data[0].id
        client.fine_tuning.jobs.cancel(waiting.id)
    return {
        "file_id": files[1].id, "training_file": files[0].id, "job_id": done.id, "adapter_id": adapter, "model": "tiny-base",
        "dataset_id": files[0].dataset_id, "fine_tuned_model_checkpoint": checkpoint, "name": "any-full@3",
        "ids": f"{done.id},{waiting.id}",
    }  # fmt: skip


def run(world: tuple[str, str, dict[str, Any]], *, cases: int) -> Counter[str]:
    """`cases` requests of each kind to each operation; answers by their status."""
    url, key, known = world
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    answers: Counter[str] = Counter()
    problems: list[str] = []
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:
            try:
                _ask(operation, mode, world=(url, key, known), cases=cases, answers=answers)
            except hypothesis.errors.Unsatisfiable:
                continue  # nothing of this kind exists: a route without parameters takes every request
            except (Exception, BaseExceptionGroup) as e:  # one operation after another: all of them are told
                if isinstance(e, InvalidSchema):
                    raise
                problems.append(f"{operation.label} ({mode}): {e!s}"[:1500])
                print(problems[-1])  # noqa: T201  (a run takes long: what is found is told at once)
    assert not problems, f"{len(problems)} of {sum(answers.values())} cases\n" + "\n\n".join(problems)
    return answers


def _ask(operation: Any, mode: GenerationMode, *, world: tuple[str, str, dict[str, Any]], cases: int, answers: Counter[str]) -> None:
    url, key, known = world

    @hypothesis.seed(SEED)
    @settings(
        max_examples=cases, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=False
    )
    @given(case=operation.as_strategy(generation_mode=mode), real=st.booleans(), anonymous=st.integers(0, 19))
    def ask(case: Any, real: bool, anonymous: int) -> None:
        if real:
            _name(case, known)
        if "/events" in operation.path and (case.query or {}).get("stream"):
            case.query["stream"] = "false"  # an open-ended answer: other tests read it
        headers = {} if anonymous == 7 else {"authorization": f"Bearer {key}"}
        answer = case.call(base_url=url, headers=headers)
        answers[str(answer.status_code)] += 1
        if answer.status_code == 503 and operation.path in UNAVAILABLE_HERE:
            return
        case.validate_response(answer, checks=CHECKS)

    ask()


def _name(case: Any, known: dict[str, Any]) -> None:
    """Put ids that exist where the document asks for some."""
    for place in (case.path_parameters, case.query, case.body):
        if isinstance(place, dict):
            place.update({name: known[name] for name in place if name in known})


def test_a_slice_of_the_document_holds(world: tuple[str, str, dict[str, Any]]) -> None:
    answers = run(world, cases=1)
    assert sum(answers.values()) > 150
    assert {"200", "400", "404"} <= set(answers), answers


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_document_holds_for_thousands_of_requests(world: tuple[str, str, dict[str, Any]]) -> None:
    answers = run(world, cases=int(os.environ.get("FT_SCHEMATHESIS_CASES", "30")))
    print(json.dumps(answers))  # noqa: T201
    assert sum(answers.values()) > 1000
