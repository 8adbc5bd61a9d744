"""``/v1/model_routes``: a tenant's own names for models, each answered by weighted targets."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader, Writer
from control_plane.serving import model_routes, responses, schemas

router = APIRouter(prefix="/v1/model_routes", tags=["model routes"])


@router.get("")
def list_routes(platform: PlatformDep, tenant: Reader) -> http_schemas.ListOf[schemas.ModelRoute]:
    """Routes by name."""
    return http_schemas.ListOf(data=[responses.model_route(r) for r in model_routes.list_routes(platform, tenant)])


@router.put("/{name}")
def put(platform: PlatformDep, tenant: Writer, name: str, body: schemas.SetRoute) -> schemas.ModelRoute:
    """Make a name stand for these targets from the next request on.

    A caller (`user` of the request, else the header `x-session-id`, else the conversation) always gets the same target;
    when weights change, as few callers as possible move.
    """
    return responses.model_route(model_routes.put(platform, tenant, name, [(t.model, t.weight) for t in body.targets]))


@router.get("/{name}")
def retrieve(platform: PlatformDep, tenant: Reader, name: str) -> schemas.ModelRoute:
    """One route, with what its targets are worth now."""
    return responses.model_route(model_routes.get(platform, tenant, name))


@router.delete("/{name}")
def delete(platform: PlatformDep, tenant: Writer, name: str) -> http_schemas.Deleted:
    """Take a name out; its targets go on under their own."""
    model_routes.delete(platform, tenant, name)
    return http_schemas.Deleted(id=name, object="model_route")
