"""A complete training spec for tests that need one and train nothing."""

from __future__ import annotations

from engine.training.spec import CheckpointPolicy, LoraSettings, Optimization, TrainingSpec

SPEC = TrainingSpec(
    method="sft",
    method_settings={},
    adapter="lora",
    base_model="tiny-base",
    base_digest="sha256:0",
    pack_fingerprint="pk_0",
    dataset_id="ds_0",
    reference=None,
    warm_start=None,
    max_seq_len=128,
    optimization=Optimization(learning_rate=1e-3, num_epochs=1, per_device_batch_size=4, accumulation_steps=2),
    lora=LoraSettings(rank=8, alpha=16),
    quantization=None,
    checkpoint=CheckpointPolicy(),
    precision="fp32",
    attention="sdpa",
    gradient_checkpointing=False,
    strategy="single",
    world_size=1,
    seed=1,
    recipe="r@1",
    lock_sha256="0",
    commit="0",
    image="local",
)
