"""``/v1/model_routes``: a tenant's own names for models, each answered by weighted targets."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader, Writer
from control_plane.serving import model_routes, responses, schemas

router = APIRouter(prefix="/v1/model_routes", tags=["model routes"])


@router.get("", summary="List model routes")
def list_routes(platform: PlatformDep, tenant: Reader) -> http_schemas.ListOf[schemas.ModelRoute]:
    """List your model routes by name."""
    return http_schemas.ListOf(data=[responses.model_route(r) for r in model_routes.list_routes(platform, tenant)])


@router.put("/{name}", summary="Create or update a model route")
def put(platform: PlatformDep, tenant: Writer, name: parameters.RouteName, body: schemas.SetRoute) -> schemas.ModelRoute:
    """Set the targets that a name stands for, from the next request on.

    A caller always gets the same target. Callers are told apart by `user` of the request, else by the header `x-session-id`, else by the
    conversation. When weights change, as few callers as possible move.
    """
    return responses.model_route(model_routes.put(platform, tenant, name, [(t.model, t.weight) for t in body.targets]))


@router.get("/{name}", summary="Retrieve a model route")
def retrieve(platform: PlatformDep, tenant: Reader, name: parameters.RouteName) -> schemas.ModelRoute:
    """Return a model route with the share of callers that each target has now."""
    return responses.model_route(model_routes.get(platform, tenant, name))


@router.delete("/{name}", summary="Delete a model route")
def delete(platform: PlatformDep, tenant: Writer, name: parameters.RouteName) -> http_schemas.Deleted:
    """Delete a model route. Its targets can still be requested under their own names."""
    model_routes.delete(platform, tenant, name)
    return http_schemas.Deleted(id=name, object="model_route")
