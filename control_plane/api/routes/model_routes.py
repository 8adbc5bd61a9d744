"""``/v1/model_routes``: a tenant's own names for models, each answered by weighted targets."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.api import render, schemas
from control_plane.api.deps import PlatformDep, Reader, Writer
from control_plane.service import routing

router = APIRouter(prefix="/v1/model_routes", tags=["model routes"])


@router.get("")
def list_routes(platform: PlatformDep, tenant: Reader) -> schemas.ListOf[schemas.ModelRoute]:
    """Routes by name."""
    return schemas.ListOf(data=[render.model_route(r) for r in routing.list_routes(platform, tenant)])


@router.put("/{name}")
def put(platform: PlatformDep, tenant: Writer, name: str, body: schemas.SetRoute) -> schemas.ModelRoute:
    """Make a name stand for these targets from the next request on.

    A caller (`user` of the request, else the header `x-session-id`, else the conversation) always gets the same target;
    when weights change, as few callers as possible move.
    """
    return render.model_route(routing.put(platform, tenant, name, [(t.model, t.weight) for t in body.targets]))


@router.get("/{name}")
def retrieve(platform: PlatformDep, tenant: Reader, name: str) -> schemas.ModelRoute:
    """One route, with what its targets are worth now."""
    return render.model_route(routing.get(platform, tenant, name))


@router.delete("/{name}")
def delete(platform: PlatformDep, tenant: Writer, name: str) -> schemas.Deleted:
    """Take a name out; its targets go on under their own."""
    routing.delete(platform, tenant, name)
    return schemas.Deleted(id=name, object="model_route")
