"""Which waiting requests join the batch: tenants take turns by the tokens that they received, not by who came first.

1. A tenant with no running request may take any free slot; the others leave the last `reserved` slots to such tenants.
2. Of the tenants that may take a slot, one with no running request is next, then the one that received the fewest tokens for its weight;
   of equals, the one that has waited longest. A tenant that comes back starts level with the least served of the present ones, so that it
   saves nothing up; without any, all start anew, so that it owes nothing for what it received alone. Tenants with work beside the batch
   (:meth:`FairTurns.begin`) are present too.
3. A tenant's own requests join in the order in which they came.
4. Prompts that join together have at most `max_join_tokens` tokens, or are one. Those of tenants with no running request join a busy batch
   without the others', and do not wait for prompts that are being computed.

Tokens of a prompt count half as much as those of an answer. The counter is that of "Fairness in Serving Large Language Models"
(https://arxiv.org/abs/2401.00588).

It imports nothing of the platform: the plugin for vLLM (``deploy/vllm``) has the same file as ``ft_fair_turns``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

PROMPT_TOKEN = 0.5
"""Cost of a prompt's token in tokens of an answer, as in the paper."""
MAX_KNOWN = 1000
"""Tenants whose counters are kept."""
T = TypeVar("T")


class QueueFull(Exception):
    """More requests wait than the queue takes: of the tenant, or of all."""

    def __init__(self, *, of_tenant: bool) -> None:
        super().__init__()
        self.of_tenant = of_tenant


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """For whom a request is, and with which weight among the others."""

    tenant: str = ""
    weight: float = 1.0


@dataclass(kw_only=True, slots=True)
class _Tenant:
    received: float = 0.0
    """Tokens, divided by the weight."""
    waiting: deque[int] = field(default_factory=deque)
    """Numbers of waiting requests in the order in which they came."""


class FairTurns(Generic[T]):
    """Waiting requests of all tenants. Not thread-safe."""

    def __init__(self, *, max_rows: int, max_join_tokens: int, max_waiting: int, max_waiting_each: int) -> None:
        self._max_rows, self._max_join_tokens = max_rows, max_join_tokens
        self._max_waiting, self._max_waiting_each = max_waiting, max_waiting_each
        self.reserved = max_rows // 4
        self._tenants: dict[str, _Tenant] = {}
        self._items: dict[int, tuple[T, Share, int]] = {}
        self._running: Counter[str] = Counter()
        self._beside: Counter[str] = Counter()
        self._next = self._first = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter([item for item, _, _ in self._items.values()])

    def add(self, item: T, share: Share, *, num_tokens: int) -> None:
        """Queue a request with a prompt of `num_tokens`; ``QueueFull`` beyond the limits."""
        tenant = self._tenants.get(share.tenant)
        of_tenant = tenant is not None and len(tenant.waiting) >= self._max_waiting_each
        if of_tenant or len(self._items) >= self._max_waiting:
            raise QueueFull(of_tenant=of_tenant)
        self._arrive(share.tenant).waiting.append(self._next)
        self._items[self._next] = (item, share, num_tokens)
        self._next += 1

    def put_back(self, item: T, share: Share, *, num_tokens: int, joined: bool = True) -> None:
        """Queue a request before its tenant's others; if it had joined, what its prompt cost is given back."""
        self._first -= 1
        self._tenants.setdefault(share.tenant, _Tenant()).waiting.appendleft(self._first)
        self._items[self._first] = (item, share, num_tokens)
        if joined:
            self._running[share.tenant] = max(0, self._running[share.tenant] - 1)
            self.charge(share, -num_tokens * PROMPT_TOKEN)

    def begin(self, share: Share) -> None:
        """Count work of a tenant that takes no slot, such as scoring a prompt; :meth:`end` ends it."""
        self._arrive(share.tenant)
        self._beside[share.tenant] += 1

    def end(self, share: Share) -> None:
        self._beside[share.tenant] -= 1
        self._beside = +self._beside

    def take(self, running: Counter[str], *, newcomers_only: bool = False) -> list[T]:
        """Return the requests that join now, beside those that are `running`, by tenant; or only those of tenants with none."""
        self.see(running)
        taken: list[T] = []
        tokens, is_busy, newcomers = 0, bool(running), False
        while (name := self._turn()) is not None:
            if self._running[name] and (newcomers_only or (is_busy and newcomers)):
                break
            newcomers = newcomers or not self._running[name]
            tokens += self._items[self._tenants[name].waiting[0]][2]
            if taken and tokens > self._max_join_tokens:
                break
            taken.append(self._join(name))
        return taken

    def see(self, running: Counter[str]) -> None:
        """Note how many requests of each tenant run."""
        self._running = running

    def peek(self) -> T | None:
        """Return the request that joins next beside the running ones; None if none may."""
        name = self._turn()
        return None if name is None else self._items[self._tenants[name].waiting[0]][0]

    def pop(self, *, joins: bool = True) -> T:
        """Return the request that :meth:`peek` returned, which joins or is only taken out; ``IndexError`` if none may join."""
        name = self._turn()
        if name is None:
            raise IndexError("no request may join")
        return self._join(name) if joins else self._items.pop(self._tenants[name].waiting.popleft())[0]

    def charge(self, share: Share, num_tokens: float = 1.0) -> None:
        """Count tokens that a tenant received."""
        self._tenants.setdefault(share.tenant, _Tenant()).received += num_tokens / share.weight

    def received(self, share: Share) -> float:
        """Return the tokens that a tenant received, divided by its weight."""
        return self._tenants[share.tenant].received if share.tenant in self._tenants else 0.0

    def drop(self, is_gone: Callable[[T], bool]) -> None:
        """Remove the waiting requests that are gone."""
        for number in [number for number, (item, _, _) in self._items.items() if is_gone(item)]:
            _, share, _ = self._items.pop(number)
            self._tenants[share.tenant].waiting.remove(number)

    def _join(self, name: str) -> T:
        item, share, num_tokens = self._items.pop(self._tenants[name].waiting.popleft())
        self._running[name] += 1
        self.charge(share, num_tokens * PROMPT_TOKEN)
        return item

    def _turn(self) -> str | None:
        if not self._items:  # the usual case, at each step
            return None
        free = self._max_rows - self._running.total()
        may = [
            (bool(self._running[name]), tenant.received, tenant.waiting[0], name)
            for name, tenant in self._tenants.items()
            if tenant.waiting and free > (self.reserved if self._running[name] else 0)
        ]
        return min(may)[-1] if may else None

    def _arrive(self, name: str) -> _Tenant:
        """Return a tenant, level with the others if it was away."""
        tenant = self._tenants.get(name)
        if tenant is not None and self._is_present(name):
            return tenant
        present = {known: one for known, one in self._tenants.items() if self._is_present(known)}
        if not present or len(self._tenants) >= MAX_KNOWN:
            self._tenants = present
        tenant = self._tenants.setdefault(name, _Tenant())
        tenant.received = max(tenant.received, min((one.received for one in present.values()), default=0.0))
        return tenant

    def _is_present(self, name: str) -> bool:
        return bool(self._running[name] or self._beside[name] or self._tenants[name].waiting)
