"""torchrun whose store listens at one address only. PyTorch's own listens on all interfaces, and asks its clients for no secret.

    python -m engine.training.runtime.parallel.torchrun --rdzv-backend=bound --rdzv-endpoint=HOST:PORT [torchrun's options] -m MODULE ARG

The first node listens at HOST, which is 127.0.0.1 for one node and the pod's address for several; the others connect to it. With port 0
(one node only) it takes a free one. The ranks use the same store.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import run
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "bound"
MEETING_S = 600
"""Time for all nodes to connect, PyTorch's default for nodes at fixed addresses."""
BACKLOG = 4096
"""Connections that wait to be accepted: one for each rank, and one for each node."""


class BoundRendezvous(RendezvousHandler):
    """Nodes of known ranks that meet once at a fixed address."""

    def __init__(self, host: str, port: int, *, rank: int, num_nodes: int, run_id: str) -> None:
        self._host, self._port, self._rank, self._num_nodes, self._run_id = host, port, rank, num_nodes, run_id

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        listens = None
        if self._rank == 0:
            family = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0][0]
            server = socket.create_server((self._host, self._port), family=family, backlog=BACKLOG)
            self._port = server.getsockname()[1]
            listens = server.detach()  # the store closes it
        store = TCPStore(
            self._host, self._port, self._num_nodes, listens is not None, timedelta(seconds=MEETING_S), master_listen_fd=listens,
            wait_for_workers=False,
        )  # fmt: skip
        bootstrap = RendezvousStoreInfo(self._host, self._port)
        return RendezvousInfo(PrefixStore(self._run_id, store), self._rank, self._num_nodes, bootstrap)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _make(params: RendezvousParameters) -> RendezvousHandler:
    host, _, port = params.endpoint.rpartition(":")
    rank = int(params.config.get("rank", 0))
    return BoundRendezvous(host.strip("[]"), int(port), rank=rank, num_nodes=params.max_nodes, run_id=params.run_id)


if __name__ == "__main__":
    rendezvous_handler_registry.register(BACKEND, _make)
    run.main()
