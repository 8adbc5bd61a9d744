"""``/v1/admin/nodes``: the nodes of the pools; drain and undrain them."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.capacity import nodes, schemas
from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Operator, OperatorPlatform
from control_plane.platform.epoch_time import epoch_seconds

router = APIRouter(prefix="/v1/admin/nodes", tags=["operators"])


@router.get("", summary="List nodes")
def list_nodes(platform: OperatorPlatform) -> http_schemas.ListOf[schemas.Node]:
    """List the nodes of all pools with the GPUs in use on each and whether it is drained."""
    return http_schemas.ListOf(data=[_rendered(node) for node in nodes.list_nodes(platform)], has_more=False)


@router.get("/{node}", summary="Retrieve a node")
def retrieve(platform: OperatorPlatform, node: parameters.NodeName) -> schemas.Node:
    """Return a node with the GPUs in use on it."""
    return _rendered(nodes.get(platform, node))


@router.post("/{node}/drain", summary="Drain a node")
def drain(platform: OperatorPlatform, operator: Operator, node: parameters.NodeName, body: schemas.DrainNode) -> schemas.Node:
    """Place no new jobs on a node; running jobs continue. Draining it again changes the reason."""
    return _rendered(nodes.drain(platform, node, reason=body.reason, by=operator.id))


@router.post("/{node}/undrain", summary="Undrain a node")
def undrain(platform: OperatorPlatform, node: parameters.NodeName) -> schemas.Node:
    """Allow new jobs on a node again."""
    return _rendered(nodes.undrain(platform, node))


def _rendered(node: nodes.NodeView) -> schemas.Node:
    return schemas.Node(
        id=node.name, pool=node.pool, gpu_type=node.gpu_type, fabric=node.fabric or None, num_gpus=node.num_gpus,
        used_gpus=node.used_gpus, num_jobs=node.num_jobs, state=node.state, drained_at=epoch_seconds(node.drained_at),
        drained_by=node.drained_by, reason=node.reason,
    )  # fmt: skip
