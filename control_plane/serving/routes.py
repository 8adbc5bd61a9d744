"""``/v1/chat/completions``, ``/v1/responses`` and ``/v1/completions``: the gateway to the inference servers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from starlette.concurrency import run_in_threadpool

from control_plane.adapters import promotions
from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader, ReaderPrincipal, Writer
from control_plane.http.disconnection import unless_disconnected
from control_plane.http.rate_limits import OpenCounts
from control_plane.http.turns import during_turn
from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page
from control_plane.serving import model_routes, own_servers, schemas
from control_plane.serving.gateway import TENANT, WEIGHT, Gateway, Target
from control_plane.serving.model_routes import Route
from control_plane.serving.request_limits import check_limits, num_answers
from control_plane.serving.responses.requests import ResponseRequest, read_request
from control_plane.serving.responses.translation import translate
from control_plane.tenants.rules import Principal, Tenant, tier_named
from core.errors import InvalidRequest, NotFound, RateLimited
from core.storable_text import check_storable
from engine.adapters import FULL_MODEL
from engine.data import normalize_request

router = APIRouter(prefix="/v1", tags=["inference"])
SESSION = "x-session-id"
CHAT = "/v1/chat/completions"
MAX_ANSWERS = 512
"""Answers of one tenant under way in an API process, over all of its requests: as many as wait for the embedded server."""


async def _in_flight(request: Request, principal: ReaderPrincipal) -> AsyncIterator[Principal]:
    """Count a request until its answer has been sent; a key has three quarters of its tenant's limit, so that another one finds room."""
    requests: OpenCounts = request.app.state.answers
    most = tier_named(principal.tenant.tier).requests_in_flight
    with ExitStack() as held:
        held.enter_context(requests.counted(((principal.tenant.id, most), (principal.id, most * 3 // 4)), _too_many))
        request.state.held_until_sent = held
        yield principal


def _count_answers(request: Request, tenant: str, number: int) -> None:
    """Count the answers that a request asks for until they have been sent: each takes a place of its own in a server's queue."""
    answers: OpenCounts = request.app.state.answers
    held: ExitStack = request.state.held_until_sent
    held.enter_context(answers.counted(((f"all requests of {tenant}", MAX_ANSWERS),), _too_many, number=number))


def _too_many(owner: str, limit: int) -> RateLimited:
    what = f"{limit} answers are under way for {owner}, the limit; wait for one to end, then send this request again"
    return RateLimited(what, code="too_many_in_flight")


InFlight = Annotated[Principal, Depends(_in_flight)]


@router.post("/chat/completions", summary="Create a chat completion")
async def chat_completions(request: Request, platform: PlatformDep, caller: InFlight, body: dict[str, Any]) -> Response:
    """Create a chat completion with a base model, a model route, or one of your adapters in production.

    The `model` of the response and the headers `x-ft-model` and `x-ft-adapter` name the exact model that answered.
    """
    return await _complete(request, platform, caller.tenant, CHAT, body, normalize=normalize_request)


@router.post("/responses", summary="Create a response")
async def create_response(request: Request, platform: PlatformDep, caller: InFlight, body: dict[str, Any]) -> Response:
    """Create a response in the format of OpenAI's Responses API: text, structured output and function calls, streamed if asked.

    It is answered by the same models as a chat completion. Responses are not stored, so a request carries its whole conversation.
    """
    asked = await run_in_threadpool(_read_response, body)
    try:
        answer = await _complete(request, platform, caller.tenant, CHAT, asked.chat, normalize=normalize_request, session=asked.session)
    except InvalidRequest as e:
        raise asked.refusal(e) from e
    return translate(answer, asked)


def _read_response(body: Mapping[str, Any]) -> ResponseRequest:
    check_limits(body)
    check_storable(body)
    return read_request(body)


@router.api_route("/responses/{response_id:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
def stored_response(_: Reader, response_id: str) -> Response:
    """Refuse calls that need a stored response."""
    message = f"no response {response_id[:80]!r}: responses are not stored; send earlier items in the input of the next one"
    raise NotFound(message, code="response_not_found", param="response_id")


@router.post("/completions", summary="Create a completion")
async def completions(request: Request, platform: PlatformDep, caller: InFlight, body: dict[str, Any]) -> Response:
    """Create a text completion with a base model, a model route, or one of your adapters in production."""
    return await _complete(request, platform, caller.tenant, "/v1/completions", body)


async def _complete(
    request: Request,
    platform: Platform,
    tenant: Tenant,
    path: str,
    body: Mapping[str, Any],
    *,
    normalize: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    session: str | None = None,
) -> Response:
    asked = await run_in_threadpool(_read, body, normalize, request.headers.get(SESSION) or session)
    _count_answers(request, tenant.id, num_answers(body))

    async def resolve() -> Target:
        async with during_turn(request):  # and none while the model answers
            found = await run_in_threadpool(_target, platform, tenant.id, asked.model, asked.affinity)
        return replace(found, sent={TENANT: tenant.id, WEIGHT: str(tier_named(tenant.tier).weight)})

    gateway: Gateway = request.app.state.inference
    return await unless_disconnected(request, gateway.forward(path, asked.body, resolve))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    model: str
    affinity: str
    body: Mapping[str, Any]


def _read(body: Mapping[str, Any], normalize: Callable[[Mapping[str, Any]], Mapping[str, Any]], session: str | None) -> _Asked:
    """Check a request and bring it into the servers' form: in a thread, because 10,000 messages take a quarter of a second."""
    check_limits(body)
    check_storable(body)
    model = body.get("model")
    if not isinstance(model, str):
        raise InvalidRequest(
            "model is missing; list what you can use with GET /v1/models", code="missing_required_parameter", param="model"
        )
    return _Asked(model=model, affinity=affinity_of(body, session), body=normalize(body))


def affinity_of(body: Mapping[str, Any], session: str | None) -> str:
    """Return the key that ties a caller to one target of a route: the request's `user`, else its session, else its conversation.

    A conversation is identified by its beginning, up to the first user message.
    """
    if isinstance(body.get("user"), str) and body["user"]:
        return f"user:{body['user']}"
    if session:
        return f"session:{session}"
    message = body.get("messages", body.get("prompt"))
    if isinstance(message, list):
        first = next((i for i, m in enumerate(message) if isinstance(m, dict) and m.get("role") == "user"), len(message) - 1)
        message = message[: first + 1]
    return f"conversation:{json.dumps(message, sort_keys=True)}"


def _target(platform: Platform, tenant: str, model: str, affinity: str) -> Target:
    found = promotions.resolve_model(platform, tenant, model, affinity=affinity)
    served_on = found.adapter.served_on if found.adapter else None
    if found.adapter is not None and found.adapter.type == FULL_MODEL:
        servers = list(served_on or ())
    else:
        servers = [url for url in own_servers.urls(platform) if served_on is None or url in served_on]
    headers = {"x-ft-model": found.model} | ({"x-ft-adapter": found.adapter.id} if found.adapter else {})
    return Target(model=found.model, servers=servers, headers=headers)


model_routes_router = APIRouter(prefix="/v1/model_routes", tags=["model routes"])


@model_routes_router.get("", summary="List model routes", response_model=http_schemas.ListOf[schemas.ModelRoute])
def list_routes(platform: PlatformDep, tenant: Reader) -> Page[Route]:
    """List your model routes by name."""
    return Page(items=model_routes.list_routes(platform, tenant), has_more=False)


@model_routes_router.put("/{name}", summary="Create or update a model route", response_model=schemas.ModelRoute)
def put(platform: PlatformDep, tenant: Writer, name: parameters.RouteName, body: schemas.SetRoute) -> Route:
    """Set the targets of a model route, effective from the next request.

    A caller always gets the same target. Callers are identified by `user` in the request, otherwise by the header `x-session-id`, otherwise
    by the conversation. When weights change, as few callers as possible move.
    """
    return model_routes.put(platform, tenant, name, [(t.model, t.weight) for t in body.targets])


@model_routes_router.get("/{name}", summary="Retrieve a model route", response_model=schemas.ModelRoute)
def retrieve(platform: PlatformDep, tenant: Reader, name: parameters.RouteName) -> Route:
    """Return a model route with the share of callers that each target has now."""
    return model_routes.get(platform, tenant, name)


@model_routes_router.delete("/{name}", summary="Delete a model route")
def delete(platform: PlatformDep, tenant: Writer, name: parameters.RouteName) -> http_schemas.Deleted:
    """Delete a model route. Its targets can still be requested under their own names."""
    model_routes.delete(platform, tenant, name)
    return http_schemas.Deleted(id=name, object="model_route")
