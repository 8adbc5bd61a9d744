"""``/v1/admin/nodes``: the nodes of the pools, and which of them get nothing new."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.capacity import nodes, schemas
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Operator, OperatorPlatform
from control_plane.platform.epoch_time import epoch_seconds

router = APIRouter(prefix="/v1/admin/nodes", tags=["operators"])


@router.get("")
def list_nodes(platform: OperatorPlatform) -> http_schemas.ListOf[schemas.Node]:
    """Every node of every pool, with the GPUs that are held there and whether it is drained."""
    return http_schemas.ListOf(data=[_rendered(node) for node in nodes.list_nodes(platform)], has_more=False)


@router.get("/{node}")
def retrieve(platform: OperatorPlatform, node: str) -> schemas.Node:
    """One node."""
    return _rendered(nodes.get(platform, node))


@router.post("/{node}/drain")
def drain(platform: OperatorPlatform, operator: Operator, node: str, body: schemas.DrainNode) -> schemas.Node:
    """Place nothing new on the node; what runs there goes on. Draining it again changes the reason."""
    return _rendered(nodes.drain(platform, node, reason=body.reason, by=operator.id))


@router.post("/{node}/undrain")
def undrain(platform: OperatorPlatform, node: str) -> schemas.Node:
    """Place jobs on the node again."""
    return _rendered(nodes.undrain(platform, node))


def _rendered(node: nodes.NodeView) -> schemas.Node:
    return schemas.Node(
        id=node.name, pool=node.pool, gpu_type=node.gpu_type, fabric=node.fabric or None, num_gpus=node.num_gpus,
        used_gpus=node.used_gpus, num_jobs=node.num_jobs, state=node.state, drained_at=epoch_seconds(node.drained_at),
        drained_by=node.drained_by, reason=node.reason,
    )  # fmt: skip
