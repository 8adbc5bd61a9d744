"""Writes a LoRA adapter as a GGUF file, which llama.cpp applies to the GGUF file of its base: the form of its convert_lora_to_gguf."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFWriter
from safetensors.torch import load_file

from core.errors import InvalidRequest
from engine.adapters import package, servability
from engine.adapters.exports.gguf_file import check_architecture, interleaved
from engine.adapters.exports.merge import changes_of


def write_adapter(adapter_dir: Path, base_config: Mapping[str, Any], target: Path, *, name: str) -> None:
    """Writes the adapter in `adapter_dir` as `target`, in float32.

    The file holds one alpha, which llama.cpp divides by the rank of each pair: what differs from that (rsLoRA, ``alpha_pattern``) is
    multiplied into B.
    """
    architecture = check_architecture(base_config)
    found = package.read_package(adapter_dir)
    alpha = found.alpha or 1.0  # 0 means "no alpha" in the file
    heads = int(base_config["num_attention_heads"])
    rows_of = {"q_proj": heads, "k_proj": int(base_config.get("num_key_value_heads") or heads)}
    names = gguf.get_tensor_name_map(architecture, int(base_config["num_hidden_layers"]))
    writer = GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    writer.add_name(name)
    for module, change in sorted(changes_of(load_file(adapter_dir / package.ADAPTER_WEIGHTS), dora=False).items()):
        known = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        if known is None:
            raise InvalidRequest(
                f"GGUF has no name for {module}, which the adapter changes; export merged weights", code="gguf_not_supported"
            )
        left = change.a.float().numpy()
        right = (change.b.float() * (servability.scale_of(found.config, module) * len(change.a) / alpha)).numpy()
        last = module.rsplit(".", 1)[-1]
        if architecture is gguf.MODEL_ARCH.LLAMA and last in rows_of:
            right = interleaved(right, rows_of[last])
        writer.add_tensor(f"{known}.lora_a", left)
        writer.add_tensor(f"{known}.lora_b", right)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
