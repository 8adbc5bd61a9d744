"""Where a rank runs, as torchrun says it. The ranks of a node share a work directory, and no node sees that of another."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    rank: int
    local_rank: int
    local_world_size: int
    """Ranks on this node; their numbers follow one another."""
    node: int
    num_nodes: int

    @classmethod
    def of_environment(cls) -> Self:
        """Read torchrun's variables; a process that it did not start is alone."""
        rank, local_rank, local_world_size, node, num_nodes = (
            int(os.environ.get(name, default))
            for name, default in (
                ("RANK", "0"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"), ("GROUP_RANK", "0"), ("GROUP_WORLD_SIZE", "1"),
            )
        )  # fmt: skip
        return cls(rank=rank, local_rank=local_rank, local_world_size=local_world_size, node=node, num_nodes=num_nodes)

    @property
    def leads_node(self) -> bool:
        """Whether this rank does what is done once on each node, such as naming a checkpoint."""
        return self.local_rank == 0

    @property
    def followers(self) -> range:
        """Other ranks of this node, seen from its first one."""
        return range(self.rank + 1, self.rank - self.local_rank + self.local_world_size)
