"""llama.cpp through llama-cpp-python, the extra ``gguf``: quantizes GGUF files, and answers from them. Loaded only when it is used."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import FtError

CONTEXT = 512


def is_installed() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


Q4_K_M = 15
"""llama.cpp's number of this kind of file."""


def quantize(source: Path, target: Path, kind: int) -> None:
    """Quantizes the GGUF file `source`. Matrices whose rows are no multiple of a block get the nearest type that takes them, as llama.cpp
    decides."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = kind
    options.nthread = len(os.sched_getaffinity(0))
    code = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(options))
    if code != 0:
        raise FtError(f"llama.cpp could not quantize {source.name} (code {code})", code="export_failed")


def logits(file: Path, sequences: Sequence[Sequence[int]], *, lora: Path | None = None) -> NDArray[np.float32]:
    """Returns the logits of the model in a GGUF file, shape (sequences, tokens, vocabulary); with the adapter of the file `lora`.

    The file is mapped, so its pages are the system's to drop; keys and values are kept in float32.
    """
    import llama_cpp

    with _without_repacking():
        model: Any = llama_cpp.Llama(
            str(file), n_ctx=CONTEXT, n_batch=CONTEXT, logits_all=True, verbose=False, type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32, n_threads=len(os.sched_getaffinity(0)), lora_path=None if lora is None else str(lora),
        )  # fmt: skip
    try:
        found = []
        for tokens in sequences:
            model.reset()
            model.eval(tokens)
            found.append(np.array(model.scores[: len(tokens)], dtype=np.float32))
    finally:
        model.close()
    return np.stack(found)


@contextmanager
def _without_repacking() -> Iterator[None]:
    """Models loaded meanwhile keep their weights as the file has them.

    Repacked for AMX (Intel's Sapphire Rapids and later), llama-cpp-python 0.3.36 ended the process with SIGSEGV on the tests' models.
    ``Llama`` has no argument for this option of llama.cpp.
    """
    from llama_cpp import llama_cpp

    defaults = llama_cpp.llama_model_default_params

    def without() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_model_default_params = without
    try:
        yield
    finally:
        llama_cpp.llama_model_default_params = defaults
