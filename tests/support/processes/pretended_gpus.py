"""Two accelerators that this process pretends to have: their tensors are computed on the CPU, and tensors of different ones do not mix.

:func:`register` makes them PyTorch's accelerator, so only a process of its own calls it. As with CUDA, an operation on tensors of
both raises ``RuntimeError``; copies, single numbers and positions on the CPU are allowed.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "pretended"
aten = torch.ops.aten
COPIES = {aten._copy_from.default, aten._to_copy.default, aten.copy_.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class OnGpu(torch.Tensor):
    """A tensor on a pretended device, whose values are those of `inner`."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> OnGpu:
        made: OnGpu = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.inference_mode(False), torch.no_grad():  # PyTorch makes views of these tensors itself, which must be ordinary ones
            return run(op, args, kwargs or {})

    def tolist(self) -> Any:
        return self.inner.tolist()


def run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU, and return its results where they belong."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    devices = {t.device for t in tensors if isinstance(t, OnGpu)}
    on_cpu = any(not isinstance(t, OnGpu) and t.dim() for t in tensors) and op not in INDEXED
    if op not in COPIES and (len(devices) > 1 or (devices and on_cpu)):
        raise RuntimeError(f"{op}: expected all tensors on one device, found {sorted(map(str, devices))}{' and cpu' if on_cpu else ''}")
    target = kwargs.get("device")
    if target is not None:
        kwargs = {**kwargs, "device": "cpu"}
    found = op(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if op._schema.name.endswith("_") and not op._schema.name.endswith("__"):
        return args[0]  # in place
    if "out" in kwargs:
        return kwargs["out"]
    where = torch.device(target) if target is not None else next(iter(devices))
    if where.type != NAME:
        return found
    where = torch.device(NAME, where.index or 0)
    return tree_map(lambda t: OnGpu(t, where) if isinstance(t, torch.Tensor) and not isinstance(t, OnGpu) else t, found)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnGpu) else value


class _Module(backend_registration._DummyBackendModule):
    """``torch.pretended``, as ``torch.cuda``."""

    def __init__(self, memory_bytes: int) -> None:
        super().__init__()
        self._memory_bytes = memory_bytes

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 0

    def is_available(self) -> bool:
        return True

    def empty_cache(self) -> None:
        pass

    def get_device_name(self, device: Any) -> str:
        return "Pretended GPU"

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=self._memory_bytes)


class _Hooks(backend_registration._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2


def register(memory_bytes: int) -> tuple[torch.device, torch.device]:
    """Pretend the devices, each with this much memory, and return them."""
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # transformers loads in this thread
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module(memory_bytes), hook=_Hooks())
    kernels = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for op in (aten.empty_strided.default, aten.empty.memory_format, *COPIES):
        kernels.impl(op, _kernel(op))
    _LIBRARIES.append(kernels)
    return torch.device(NAME, 0), torch.device(NAME, 1)


_LIBRARIES: list[Any] = []
"""Kernels are registered while their library lives."""


def _kernel(op: Any) -> Any:
    return lambda *args, **kwargs: run(op, args, kwargs)
