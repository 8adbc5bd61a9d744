"""Brings a checkpoint to every node of a gang: files that a node lacks come from one that has them, over the ranks' own network.

Every node gets all files, because both formats of sharded checkpoints need them: an entry that is the same on all ranks is stored once, in
the part of any of them, and another number of ranks reads other parts than its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from core.errors import IntegrityError
from engine.training import checkpoints
from engine.training.checkpoints import CheckpointManifest
from engine.training.disk_space import raising_disk_full
from engine.training.runtime import collectives
from engine.training.runtime.topology import Topology

CHUNK_BYTES = 64 << 20
"""Sent at once: held in memory by each rank, twice on a GPU."""

log = logging.getLogger(__name__)


def bring(directory: Path, here: Topology, device: torch.device) -> bool:
    """Have the checkpoint of `directory` whole on every node; returns False on all ranks if no whole one can be made of what they have.

    Every rank calls it. What arrives is held against the digests, and appears by one rename.
    """
    own = _sound(directory) if here.leads_node else None
    found: list[tuple[bool, CheckpointManifest | None]] = [(False, None)] * dist.get_world_size()
    dist.all_gather_object(found, (here.leads_node, own))
    held = [manifest for _, manifest in found]
    whole = _whole(held)
    if whole is None:
        return False
    num_nodes = sum(leads for leads, _ in found)
    lacking = here.leads_node and (own is None or own.num_nodes > 1 or own.files != whole.files)
    draft = checkpoints.begin(directory) if lacking else None
    for name, part in sorted(whole.files.items()):
        holders = [rank for rank, manifest in enumerate(held) if manifest is not None and manifest.files.get(name) == part]
        target = None if draft is None else draft / name
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            if here.rank in holders:
                os.link(directory / name, target)
                target = None
        if len(holders) < num_nodes:
            _send(directory / name, target, part.bytes, source=holders[0], device=device)
    sound = draft is None or _placed(draft, directory, whole)
    (failed,) = collectives.reduce_sum([float(not sound)], device)
    return not failed


def _sound(directory: Path) -> CheckpointManifest | None:
    try:
        return checkpoints.verify_checkpoint(directory)
    except IntegrityError:
        return None


def _whole(held: Sequence[CheckpointManifest | None]) -> CheckpointManifest | None:
    """Return what rank 0 has whole, or what the parts of all nodes make together."""
    first = held[0]
    if first is None or first.num_nodes == 1:
        return first
    try:
        return checkpoints.merged_manifest([manifest for manifest in held if manifest is not None])
    except IntegrityError as error:
        log.warning("%s", error.message)
        return None


def _send(path: Path, target: Path | None, size: int, *, source: int, device: torch.device) -> None:
    """Send the file at `path` of rank `source` to all ranks; those with a `target` write it there."""
    sends = dist.get_rank() == source
    with open(path if sends else os.devnull, "rb") as read, open(target or os.devnull, "wb") as written:
        for begins in range(0, size, CHUNK_BYTES):
            length = min(CHUNK_BYTES, size - begins)
            chunk = torch.empty(length, dtype=torch.uint8)
            if sends:
                chunk = torch.frombuffer(bytearray(read.read(length)), dtype=torch.uint8)
            moved = chunk.to(device)
            dist.broadcast(moved, src=source)
            if target is not None:
                with raising_disk_full(target.parent):
                    written.write(moved.cpu().numpy().tobytes())


def _placed(draft: Path, directory: Path, whole: CheckpointManifest) -> bool:
    try:
        checkpoints.place(draft, directory, whole)
    except IntegrityError as error:
        log.warning("%s did not arrive as it was sent: %s", directory.name, error.message)
        return False
    return True
