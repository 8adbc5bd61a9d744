"""``/v1/admin/nodes``: the nodes of the pools; drain and undrain them."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.capacity import nodes, schemas
from control_plane.capacity.nodes import NodeView
from control_plane.http import parameters
from control_plane.http.authentication import Operator, OperatorPlatform
from control_plane.http.schemas import ListOf
from control_plane.platform.pagination import Page

router = APIRouter(prefix="/v1/admin/nodes", tags=["operators"])


@router.get("", summary="List nodes", response_model=ListOf[schemas.Node])
def list_nodes(platform: OperatorPlatform) -> Page[NodeView]:
    """List the nodes of all pools with the GPUs in use on each and whether it is drained."""
    return Page(items=nodes.list_nodes(platform), has_more=False)


@router.get("/{node}", summary="Retrieve a node", response_model=schemas.Node)
def retrieve(platform: OperatorPlatform, node: parameters.NodeName) -> NodeView:
    """Return a node with the GPUs in use on it."""
    return nodes.get(platform, node)


@router.post("/{node}/drain", summary="Drain a node", response_model=schemas.Node)
def drain(platform: OperatorPlatform, operator: Operator, node: parameters.NodeName, body: schemas.DrainNode) -> NodeView:
    """Place no new jobs on a node; running jobs continue. Draining it again changes the reason."""
    return nodes.drain(platform, node, reason=body.reason, by=operator.id)


@router.post("/{node}/undrain", summary="Undrain a node", response_model=schemas.Node)
def undrain(platform: OperatorPlatform, node: parameters.NodeName) -> NodeView:
    """Allow new jobs on a node again."""
    return nodes.undrain(platform, node)
