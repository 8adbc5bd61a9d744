"""Every route against every kind of key. `NEEDED` says what each route needs; a route that is not in it fails here."""

from __future__ import annotations

import io
import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.types import ASGIApp

from control_plane.adapters import exports
from control_plane.api.app import JOB_PATHS, create_app
from control_plane.datasets.scored_suites import service as scored_suites
from control_plane.datasets.scored_suites.service import Scoring
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.notifications.signatures import sealed_secrets, sealed_url
from control_plane.notifications.tables import SigningSecret, webhook_endpoints
from control_plane.platform.context import Platform
from control_plane.tenants import members, operators
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Role
from tests.support.jobs.registered_adapter import add_adapter
from tests.support.platform.database_roles import as_operator, as_owner

JOB, ADAPTER, HOOK = "/v1/fine_tuning/jobs/{job_id}", "/v1/adapters/{adapter_id:path}", "/v1/webhook_endpoints/{webhook_endpoint_id}"
TENANT, EXPORT, EVALUATION = "/v1/admin/tenants/{tenant}", f"{ADAPTER}/exports/{{export_id}}", f"{ADAPTER}/evaluations/{{evaluation_id}}"
PERMISSIONS = "/v1/fine_tuning/checkpoints/{fine_tuned_model_checkpoint}/permissions"
NEEDED: Mapping[str, str] = {
    "nobody": """
        GET /, GET /docs, GET /favicon.ico, GET /livez, GET /healthz, GET /readyz, GET /openapi.json,
        GET /.well-known/ft-signing-keys.json""",
    "scraper": "GET /metrics",
    "agent": """
        POST /internal/attempt/heartbeat, POST /internal/attempt/restored, POST /internal/attempt/checkpoints,
        POST /internal/attempt/objects/read, POST /internal/attempt/objects/write, POST /internal/attempt/objects/complete,
        PUT /internal/attempt/log/{begins}""",
    "read": f"""
        POST /v1/fine_tuning/jobs/estimate, POST /v1/fine_tuning/jobs/estimate-price, POST /v1/fine-tunes/estimate-price,
        GET /v1/fine_tuning/jobs, GET /v1/fine_tuning/jobs/compare, GET {JOB}, GET {JOB}/events, GET {JOB}/checkpoints, GET {JOB}/metrics,
        GET {JOB}/metrics.csv, GET {JOB}/tensorboard, GET {JOB}/logs, GET {JOB}/evaluation, GET {JOB}/evaluation/samples, GET {JOB}/cost,
        POST /v1/fine_tuning/estimate, POST /v1/fine_tuning/preview, GET /v1/fine_tuning/model_limits,
        POST /v1/fine_tuning/alpha/graders/run, POST /v1/fine_tuning/alpha/graders/validate,
        GET /v1/fine_tuning/sweeps, GET /v1/fine_tuning/sweeps/{{sweep_id}}, GET /v1/fine_tuning/sweeps/{{sweep_id}}/compare,
        GET /v1/files, GET /v1/files/{{file_id}}, GET /v1/files/{{file_id}}/events, GET /v1/files/{{file_id}}/content,
        GET /v1/uploads/{{upload_id}},
        GET /v1/datasets, GET /v1/datasets/{{dataset_id}}, GET /v1/datasets/{{dataset_id}}/preview, GET /v1/datasets/{{dataset_id}}/report,
        GET /v1/suites, GET /v1/suites/index, GET /v1/scored_suites, GET /v1/scored_suites/{{name}}, GET /v1/capability_suites,
        GET /v1/recipes, GET /v1/recipes/{{name}}, GET /v1/quota,
        GET /v1/queue,
        GET /v1/models, GET /v1/models/{{model:path}}, GET /v1/models/{{model:path}}/lineage, GET /v1/models/{{model:path}}/tokenizer,
        GET /v1/adapters, GET {ADAPTER}, GET {ADAPTER}/lineage, GET {ADAPTER}/signature, GET {ADAPTER}/server,
        GET {ADAPTER}/exports, GET {EXPORT},
        GET {EXPORT}/content, GET {ADAPTER}/evaluations, GET {EVALUATION}, GET {EVALUATION}/report, GET {EVALUATION}/samples,
        GET /v1/model_routes, GET /v1/model_routes/{{name}}, GET /v1/model_routes/{{name}}/rewrite,
        POST /v1/chat/completions, POST /v1/completions, GET /v1/me,
        POST /v1/responses, GET /v1/responses/{{response_id:path}}, POST /v1/responses/{{response_id:path}},
        DELETE /v1/responses/{{response_id:path}},
        GET /v1/webhook_event_types, GET /v1/webhook_endpoints, GET {HOOK}, GET {HOOK}/deliveries,
        GET /v1/integrations/wandb,
        GET /v1/usage, GET /v1/usage.csv, GET /v1/ledger, GET /v1/ledger/entries, GET /v1/budgets, GET /v1/budgets/{{budget_id}},
        GET /v1/invoices, GET /v1/invoices/{{month}}, GET /v1/invoices/{{month}}.csv,
        GET /v1/deletions, GET /v1/deletions/{{deletion_id}}""",
    "write": f"""
        POST /v1/fine_tuning/jobs, POST {JOB}/cancel, POST {JOB}/pause, POST {JOB}/resume,
        POST /v1/fine_tuning/sweeps, POST /v1/fine_tuning/sweeps/{{sweep_id}}/cancel,
        POST /v1/files, DELETE /v1/files/{{file_id}}, POST /v1/files/{{file_id}}/validate,
        POST /v1/uploads, POST /v1/uploads/{{upload_id}}/parts, POST /v1/uploads/{{upload_id}}/complete,
        POST /v1/uploads/{{upload_id}}/cancel,
        POST /v1/datasets/import, POST /v1/datasets/{{dataset_id}}/approve, POST /v1/suites, DELETE /v1/suites/{{name}},
        POST /v1/scored_suites, DELETE /v1/scored_suites/{{name}},
        POST /v1/models/{{model:path}}/deploy, DELETE /v1/models/{{model:path}},
        POST /v1/models/{{adapter_id:path}}/promote, POST /v1/models/{{adapter_id:path}}/rollback,
        POST /v1/models/{{adapter_id:path}}/deprecate, POST /v1/models/{{adapter_id:path}}/approve,
        POST /v1/models/{{adapter_id:path}}/reject,
        POST {ADAPTER}/promote, POST {ADAPTER}/rollback, POST {ADAPTER}/deprecate, POST {ADAPTER}/approve, POST {ADAPTER}/reject,
        POST {ADAPTER}/exports, DELETE {EXPORT}, POST {ADAPTER}/evaluations,
        PUT /v1/model_routes/{{name}}, DELETE /v1/model_routes/{{name}},
        POST /v1/budgets, POST /v1/budgets/{{budget_id}}, DELETE /v1/budgets/{{budget_id}}""",
    "admin": f"""
        POST /v1/api_keys, GET /v1/api_keys, GET /v1/api_keys/{{key_id}}, POST /v1/api_keys/{{key_id}}/rotate,
        DELETE /v1/api_keys/{{key_id}}, POST /v1/members, GET /v1/members, GET /v1/members/{{member_id}}, POST /v1/members/{{member_id}},
        DELETE /v1/members/{{member_id}}, GET /v1/audit_log, GET /v1/data_export, POST /v1/data_deletions,
        PUT /v1/integrations/wandb, DELETE /v1/integrations/wandb, POST {ADAPTER}/release,
        POST {PERMISSIONS}, GET {PERMISSIONS}, DELETE {PERMISSIONS}/{{permission_id}},
        POST /v1/webhook_endpoints, POST {HOOK}, DELETE {HOOK}, POST {HOOK}/rotate_secret, POST {HOOK}/test, POST {HOOK}/replay,
        POST {HOOK}/deliveries/{{delivery_id}}/replay""",
    "operator": f"""
        POST /v1/admin/tenants, GET /v1/admin/tenants, GET {TENANT}, POST {TENANT}, POST {TENANT}/suspend, POST {TENANT}/resume,
        GET {TENANT}/api_keys, POST {TENANT}/api_keys, DELETE {TENANT}/api_keys/{{key_id}}, GET /v1/admin/audit_log,
        GET /v1/admin/refunds, POST /v1/admin/refunds/{{case_id}}/grant, POST /v1/admin/refunds/{{case_id}}/refuse,
        POST /v1/admin/adjustments, GET /v1/admin/ledger, GET /v1/admin/ledger/check,
        GET /v1/admin/nodes, GET /v1/admin/nodes/{{node}}, POST /v1/admin/nodes/{{node}}/drain, POST /v1/admin/nodes/{{node}}/undrain,
        GET /v1/admin/dead_letters, POST /v1/admin/dead_letters/{{job_id}}/release, POST /v1/admin/dead_letters/{{job_id}}/close,
        GET /v1/admin/recipes, POST /v1/admin/recipes, POST /v1/admin/recipes/{{name}}/retire,
        GET /v1/admin/queue, GET /v1/admin/usage, GET {TENANT}/ledger, GET {TENANT}/invoices,
        POST {TENANT}/adapters/{{adapter_id:path}}/release, GET {TENANT}/invoices/{{month}}""",
}
"""By the least that opens it: every route of the API, those of jobs under the first of their three paths."""
ORDER = ("read", "write", "admin")
OPEN: Mapping[str, tuple[int, str] | None] = {"nobody": None, "scraper": None, "agent": (409, "attempt_released")}
"""What routes that need no key answer, whoever calls: those of agents know only tokens of running attempts."""
HELD_BY = {f"of-{role}": role.scope.value for role in Role}
"""By member's key, the widest scope that it opens; what a role may do to keys and members is in test_key_rules.py."""
TABLE = {route.strip(): need for need, routes in NEEDED.items() for route in routes.split(",")}

NO_OBJECT = {
    "GET /v1/models/{model:path}/tokenizer",
    "GET /v1/recipes/{name}",
    "PUT /v1/model_routes/{name}",
    "GET /v1/invoices/{month}",
    "GET /v1/invoices/{month}.csv",
}
"""Their names are the platform's, or each tenant's own: there is nothing of another tenant to find."""
STRANGER = f"str-{uuid.uuid4().hex[:8]}"
BODIES: Mapping[str, Any] = {
    "POST /v1/members/{member_id}": {"name": "x"},
    "POST /v1/budgets/{budget_id}": {"name": "x"},
    "POST /v1/uploads/{upload_id}/complete": {"part_ids": []},
    f"POST {ADAPTER}/exports": {"format": "adapter"},
    f"POST {ADAPTER}/release": {"reason": "x"},
    f"POST {HOOK}": {"name": "x"},
    f"POST {HOOK}/replay": {"since": 0},
    f"POST {PERMISSIONS}": {"project_ids": [STRANGER]},
}
"""What a call needs to get as far as its object."""
QUERIES = {"GET /v1/datasets/{dataset_id}/preview": "?model=tiny-base"}
REFUSALS = {"missing_api_key", "invalid_api_key", "insufficient_scope", "operator_key_required", "tenant_key_required"}


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """An API with an owner of one object of each kind, a stranger, and a key of each kind."""

    url: str
    app: FastAPI
    keys: Mapping[str, str]
    real: Mapping[str, str]
    """By the name of a path's parameter, ids of the owner's objects."""
    client: httpx.Client = field(repr=False)

    def routes(self, *, twice: bool = False) -> Iterator[tuple[str, str, str]]:
        """Method, path and entry in `TABLE` of every route; with `twice` those of jobs under their other paths, too."""
        for route in iter_route_contexts(self.app.routes):
            for method in sorted(cast(set[str], route.methods) - {"HEAD"}):
                path = str(route.path)
                if path.startswith("/console"):
                    continue  # pages, which lead to a sign-in: tests/control_plane/console/pages/test_pages.py
                under = next((p for p in JOB_PATHS[1:] if path == p or path.startswith(f"{p}/")), None)
                if twice or under is None:
                    yield method, path, f"{method} {path if under is None else JOB_PATHS[0] + path[len(under) :]}"

    def call(self, method: str, path: str, key: str | None, body: Any = None) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        options = {} if method in ("GET", "DELETE") else {"json": {} if body is None else body}
        return self.client.request(method, path, headers=headers, **options)


@pytest.fixture(scope="module")
def world(platform: Platform, serve: Callable[[ASGIApp], str]) -> Iterator[World]:
    yield from opened(platform, serve)


@pytest.fixture(scope="module")
def unconfined(new_platform: Callable[..., Platform], serve: Callable[[ASGIApp], str]) -> Iterator[World]:
    """A world whose database shows every row to every tenant: what keeps them apart is the API's own queries."""
    platform = new_platform()
    with as_owner(platform).begin() as conn:
        confined = conn.exec_driver_sql("SELECT quote_ident(relname) FROM pg_class WHERE relrowsecurity").scalars().all()
        assert len(confined) > 30
        for table in confined:
            conn.exec_driver_sql(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
    yield from opened(platform, serve)


LAYERS = pytest.mark.parametrize("layer", ["world", "unconfined"], ids=["with row security", "without row security"])


def opened(platform: Platform, serve: Callable[[ASGIApp], str]) -> Iterator[World]:
    owner, key = tenants.create(platform, f"own-{uuid.uuid4().hex[:8]}")
    _, stranger = tenants.create(platform, STRANGER)
    keys = {scope: tenants.create_key(platform, owner.id, name=scope, scopes=[scope]).secret for scope in ORDER}
    keys |= {"stranger": stranger.secret, "operator": operators.create(as_operator(platform), "matrix").secret}
    for role in Role:
        person = members.add(platform, owner.id, email=f"{role}@example.com", role=role).id
        keys[f"of-{role}"] = tenants.create_key(platform, owner.id, name=role, scopes=[role.scope], member_id=person).secret
    app = create_app(platform)
    url = serve(app)
    with httpx.Client(base_url=url, timeout=60) as client:
        made = World(url=url, app=app, keys=keys, real={"tenant": owner.id, "key_id": key.id}, client=client)
        yield World(url=url, app=app, keys=keys, real={**made.real, **_objects(platform, owner.id, made)}, client=client)


def _objects(platform: Platform, tenant: str, world: World) -> dict[str, str]:
    def make(method: str, path: str, body: Any) -> Any:
        answer = world.call(method, path, world.keys["admin"], body)
        assert answer.status_code == 200, (path, answer.text)
        return answer.json()

    rows = "\n".join(
        json.dumps({"messages": [{"role": "user", "content": f"a{i}"}, {"role": "assistant", "content": "b"}]}) for i in range(120)
    )
    upload = uploaded_files.create(platform, tenant, io.BytesIO(rows.encode()), filename="a.jsonl", purpose="fine-tune")
    job = jobs.submit(platform, tenant, JobRequest.from_body({"model": "tiny-base", "training_file": upload.id})).job.id
    model = f"ft:tiny-base:{tenant}::m"
    adapter = add_adapter(platform, tenant, name=model, stage="production", loaded=True)
    export = exports.request(platform, tenant, adapter, format="adapter", precision=None).id
    person = members.add(platform, tenant, email="a@example.com", role="viewer").id
    make("PUT", "/v1/model_routes/support-bot", {"targets": [{"model": model, "weight": 1}]})
    suite = io.BytesIO(b'{"prompt": "a", "completion": "b"}')
    scored_suites.add(platform, tenant, suite, name="support-bot", filename="s.jsonl", scoring=Scoring(metric="exact_match"))
    evaluation = world.call("POST", f"/v1/adapters/{adapter}/evaluations", world.keys["admin"]).json()
    budget = make("POST", "/v1/budgets", {"name": "b", "limit_micros": 1_000_000, "thresholds": [50]})["id"]
    announced = make(
        "POST", "/v1/uploads", {"filename": "u.jsonl", "bytes": 1000, "purpose": "fine-tune", "mime_type": "application/jsonl"}
    )
    ranks = {"model": "tiny-base", "training_file": upload.id, "sweep": {"parameters": {"rank": [8, 16]}}}
    hook = {"id": f"we_{uuid.uuid4().hex[:24]}", "tenant_id": tenant, "name": "h", "state": "enabled", "event_types": ["invoice.issued"]}
    sealed = sealed_url(platform.settings, "https://example.com/")
    sealed |= sealed_secrets(platform.settings, SigningSecret(secret="whsec_"))
    now = {"created_at": platform.clock(), "updated_at": platform.clock()}
    with platform.engine.begin() as conn:  # this platform sends nothing, so its API makes none
        conn.execute(sa.insert(webhook_endpoints).values(**hook, **now, **sealed))
    return {
        "sweep_id": make("POST", "/v1/fine_tuning/sweeps", ranks)["id"], "webhook_endpoint_id": hook["id"], "job_id": job,
        "file_id": upload.id, "dataset_id": upload.dataset_id, "adapter_id": adapter, "model": model,
        "export_id": export, "member_id": person, "name": "support-bot", "evaluation_id": evaluation["id"], "budget_id": budget,
        "upload_id": announced["id"],
    }  # fmt: skip


def filled(path: str, ids: Mapping[str, str]) -> str:
    """`path` with ids in the place of its parameters; an object that is not made has an id that names nothing."""
    return re.sub(r"\{(\w+)(?::path)?\}", lambda m: ids.get(m[1], "2020-01" if m[1] == "month" else "none"), path)


def test_every_route_says_what_it_needs_and_nothing_else_does(world: World) -> None:
    found = {entry for _, _, entry in world.routes(twice=True)}
    assert len(found) > 100, "the search found too little to mean anything"
    assert sorted(found - set(TABLE)) == [], "declare what the route needs in NEEDED"
    assert sorted(set(TABLE) - found) == []
    assert all(need == "operator" for entry, need in TABLE.items() if " /v1/admin/" in entry)


def answered(world: World, key: str | None, *, of_operators: str | None = None, twice: bool = False) -> dict[str, tuple[int, str | None]]:
    """Status and code of every route for `key`, asked for objects that are not there; `of_operators` on their routes."""
    found = {}
    for method, path, entry in world.routes(twice=twice):
        sent = of_operators if of_operators and TABLE.get(entry) == "operator" else key
        answer = world.call(method, filled(path, {}), sent, BODIES.get(entry))
        code = answer.json()["error"]["code"] if answer.is_client_error else None
        found[f"{method} {path}"] = answer.status_code, code
        assert answer.status_code < 500 or (answer.status_code == 503 and TABLE[entry] == "read"), (method, path, answer.text)
    return found


def odd(world: World, found: Mapping[str, tuple[int, str | None]], expected: Callable[[str], tuple[int, str] | None]) -> dict[str, Any]:
    """Answers that are not as expected of the need of their route; None: anything but a refusal of the key."""
    wrong = {}
    for method, path, entry in world.routes(twice=True):
        if (answer := found.get(f"{method} {path}")) is None:
            continue
        status, code = answer
        want = expected(TABLE[entry])
        if ((status, code) != want) if want is not None else code in REFUSALS:
            wrong[f"{method} {path}"] = (status, code, want)
    return wrong


def test_without_a_key_only_what_is_nobodys_opens(world: World) -> None:
    found = answered(world, None, twice=True)
    assert odd(world, found, lambda need: OPEN.get(need, (401, "missing_api_key"))) == {}


def test_an_unknown_key_opens_nothing(world: World) -> None:
    found = answered(world, "ft-sk-" + "x" * 43, of_operators="ft-op-" + "x" * 43)
    assert odd(world, found, lambda need: OPEN.get(need, (401, "invalid_api_key"))) == {}


@pytest.mark.parametrize("kind", [*ORDER, "of-viewer", *(pytest.param(k, marks=pytest.mark.slow) for k in HELD_BY if k != "of-viewer")])
def test_a_key_opens_what_its_scope_or_role_says_and_no_operators_route(world: World, kind: str) -> None:
    held = HELD_BY.get(kind, kind)

    def expected(need: str) -> tuple[int, str] | None:
        if need == "operator":
            return 403, "operator_key_required"
        if need == "agent":
            return OPEN[need]
        return (403, "insufficient_scope") if need in ORDER and ORDER.index(need) > ORDER.index(held) else None

    assert odd(world, answered(world, world.keys[kind], twice=kind == "read"), expected) == {}


def test_an_operators_key_opens_operators_routes_alone(world: World) -> None:
    found = answered(world, world.keys["operator"])
    assert odd(world, found, lambda need: (403, "tenant_key_required") if need in ORDER else OPEN.get(need)) == {}


def with_objects(world: World) -> Iterator[tuple[str, str, str]]:
    for method, path, entry in world.routes():
        if "{" in path and TABLE[entry] in ORDER and entry not in NO_OBJECT:
            yield method, path, entry


@LAYERS
def test_another_tenants_object_is_as_if_it_had_never_been(layer: str, request: pytest.FixtureRequest) -> None:
    """A stranger with every scope gets 404, in the words with which an id is answered that nobody has."""
    world: World = request.getfixturevalue(layer)
    wrong, num_real = {}, 0
    for method, path, entry in with_objects(world):
        real = filled(path, world.real)
        never = filled(path, {name: _other(id_) for name, id_ in world.real.items()})
        num_real += real != never
        answers = [world.call(method, asked + QUERIES.get(entry, ""), world.keys["stranger"], BODIES.get(entry)) for asked in (real, never)]
        said = [_without_ids(answer.text, world) for answer in answers]
        if [a.status_code for a in answers] != [404, 404] or said[0] != said[1]:
            wrong[f"{method} {path}"] = [(a.status_code, a.text) for a in answers]
    assert wrong == {}, json.dumps(wrong, indent=1)
    assert num_real > 50, "too few objects are real for this to mean anything"


@LAYERS
def test_nothing_that_is_listed_or_exported_names_another_tenants_objects(layer: str, request: pytest.FixtureRequest) -> None:
    world: World = request.getfixturevalue(layer)
    ids = set(world.real.values()) - {"support-bot"}  # a name that each tenant may have
    shown: dict[str, list[set[str]]] = {"admin": [], "stranger": []}
    leaks = {}
    for method, path, entry in world.routes():
        if method != "GET" or "{" in path or TABLE[entry] not in ORDER:
            continue
        for kind, found in shown.items():
            answer = world.call(method, path, world.keys[kind])
            assert answer.status_code < 500, (path, answer.text)
            found.append({id_ for id_ in ids if id_ in answer.text})
        if shown["stranger"][-1]:
            leaks[path] = shown["stranger"][-1]
    assert leaks == {}
    assert len(shown["admin"]) > 15
    assert len(set().union(*shown["admin"])) > 8, "the owner's own lists name its objects, or this would mean nothing"


def test_the_owner_finds_these_objects(world: World) -> None:
    """Or the test above would pass for ids that nobody has."""
    found = {}
    for method, path, entry in with_objects(world):
        names = set(re.findall(r"\{(\w+)", path))
        if method == "GET" and names <= set(world.real) and entry not in LATER:
            found[f"{method} {path}"] = world.call(
                method, filled(path, world.real), world.keys["read" if TABLE[entry] == "read" else "admin"]
            ).status_code
    assert {path: status for path, status in found.items() if status == 404} == {}
    assert len(found) > 20


LATER = {
    f"GET {JOB}/logs",
    f"GET {JOB}/evaluation",
    f"GET {JOB}/evaluation/samples",
    f"GET {EVALUATION}/report",
    f"GET {EVALUATION}/samples",
    f"GET {ADAPTER}/signature",
}
"""404 until the job has run, and was evaluated; until the worker has signed the adapter."""


def _other(id_: str) -> str:
    """An id of the same form that nobody has."""
    return id_[:-4] + "zzzz"


def _without_ids(text: str, world: World) -> str:
    for id_ in sorted(world.real.values(), key=len, reverse=True):
        text = text.replace(id_, "ID").replace(_other(id_), "ID")
    return text
