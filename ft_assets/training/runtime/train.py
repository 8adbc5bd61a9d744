"""One attempt: from a run file to a finished adapter, or to the reason why not.

Imported only after ``imports.import_stack``; everything that can be refused without torch was refused before.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import PrinterCallback, set_seed
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from ft_assets.training import checkpoints
from ft_assets.training.runtime.callbacks import HealthCallback, LoopCallback
from ft_assets.training.runtime.data import Pack
from ft_assets.training.runtime.modeling import load_base, lora_config, require_finite, save_weights
from ft_assets.training.runtime.reporting import Heartbeat, MetricsLog, Progress
from ft_assets.training.runtime.saving import Checkpointer
from ft_assets.training.runtime.self_test import SelfTest, check_packing, choose_windows, fused_loss, plain_loss
from ft_assets.training.runtime.stopping import StopRequest
from ft_assets.training.runtime.validation import validation_loss
from ft_assets.training.spec import RunFile, TrainingSpec

log = logging.getLogger(__name__)

SELF_TEST_WINDOWS = 2
MAX_SELF_TEST_SEARCH = 64
"""Windows that are looked at for ones that hold several examples."""


class PackedTrainer(SFTTrainer):
    """SFTTrainer that remembers whether the losses of the present step are finite."""

    loss_is_finite = True

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.loss_is_finite = bool(torch.isfinite(loss).all()) and (self.loss_is_finite or self.state.global_step != self._finite_step)
        self._finite_step = self.state.global_step
        return loss

    _finite_step = -1


def run(
    run_file: RunFile, pack: Pack, *, vocab_size: int, progress: Progress, heartbeat: Heartbeat, stop: StopRequest, rank: int
) -> dict[str, Any]:
    """Train to the end and write ``final/``; returns what the exit evidence adds. Raises a ``RunEnded`` otherwise."""
    spec = run_file.spec
    _deterministic(spec.seed)
    model, tokenizer = load_base(run_file.base_model_dir, spec)
    progress.total_steps = spec.optimization.total_steps(num_windows=pack.train.num_rows, world_size=spec.world_size)
    trainer = build_trainer(spec, model, tokenizer, pack, total_steps=progress.total_steps, output_dir=run_file.work_dir)

    heartbeat.enter("self_test")
    tested = self_test(trainer, spec)

    resume_from = checkpoints.latest_valid(
        run_file.work_dir / "checkpoints", spec.sha256, on_skip=lambda path, why: log.warning("skipped %s: %s", path.name, why)
    )
    tokens_before = _continue_counters(resume_from, run_file, progress, rank=rank)
    _add_callbacks(trainer, run_file, pack, vocab_size, progress, heartbeat, stop, tokens_before)
    set_seed(spec.seed)
    trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))

    heartbeat.enter("save")
    if rank == 0:
        _write_final(trainer, run_file, progress)
    return {
        "self_test": {"examples": tested.examples, "boundaries": tested.boundaries, "worst": tested.worst},
        "resumed_from": None if resume_from is None else resume_from.name,
    }


def build_trainer(spec: TrainingSpec, model: Any, tokenizer: Any, pack: Pack, *, total_steps: int, output_dir: Path) -> PackedTrainer:
    """The trainer of `spec` over pre-packed windows. No saving, logging or reporting of its own."""
    opt = spec.optimization
    arguments = SFTConfig(
        output_dir=str(output_dir),
        use_cpu=not torch.cuda.is_available(),
        seed=spec.seed,
        data_seed=spec.seed,
        max_steps=total_steps,
        per_device_train_batch_size=opt.windows_per_device,
        gradient_accumulation_steps=opt.accumulation_steps,
        learning_rate=opt.learning_rate,
        lr_scheduler_type="constant_with_warmup" if opt.schedule == "constant" else opt.schedule,
        warmup_steps=math.ceil(total_steps * opt.warmup_ratio),
        weight_decay=opt.weight_decay,
        max_grad_norm=opt.max_grad_norm,
        adam_beta1=opt.adam_betas[0],
        adam_beta2=opt.adam_betas[1],
        optim=opt.optimizer,
        bf16=spec.precision == "bf16",
        fp16=spec.precision == "fp16",
        activation_checkpointing=spec.gradient_checkpointing,
        gradient_checkpointing=None,  # type: ignore[arg-type]
        packing=True,
        max_length=spec.max_seq_len,
        dataset_kwargs={"skip_prepare_dataset": True},
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )
    trainer = PackedTrainer(
        model, args=arguments, train_dataset=Dataset(pack.train), processing_class=tokenizer, peft_config=lora_config(spec, model)
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def self_test(trainer: Any, spec: TrainingSpec) -> SelfTest:
    """Prove on the first windows of several examples that packing is exact (see ``self_test.py``)."""
    rows = trainer.train_dataset[: min(MAX_SELF_TEST_SEARCH, len(trainer.train_dataset))]
    windows = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    was_training = trainer.model.training
    trainer.model.eval()
    result = check_packing(
        choose_windows(windows, count=max(SELF_TEST_WINDOWS, spec.optimization.windows_per_device)),
        collate=trainer.data_collator,
        packed=fused_loss(trainer.model),
        alone=plain_loss(trainer.model),
        device=trainer.args.device,
        precision=spec.precision,
    )
    trainer.model.train(was_training)
    log.info("packing self-test: %d examples, %d boundaries, worst %.1e", result.examples, result.boundaries, result.worst)
    return result


def _deterministic(seed: int) -> None:
    """One result per seed; and no progress bars or notices of renamed options in the log that tenants read."""
    warnings.simplefilter("ignore", FutureWarning)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling fresh memory is a debugging aid that costs a fifth of a step on a CPU; results do not depend on it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    set_seed(seed)


def _continue_counters(resume_from: Path | None, run_file: RunFile, progress: Progress, *, rank: int) -> int:
    """Counters of the checkpoint, or zero; the metrics log is cut to the step that is resumed."""
    manifest = None if resume_from is None else checkpoints.read_manifest(resume_from)
    progress.step = progress.committed_step = 0 if manifest is None else manifest.step
    progress.num_tokens = 0 if manifest is None else int(manifest.metrics["num_tokens"])
    if rank == 0:
        MetricsLog(run_file.work_dir / "metrics.jsonl").keep_through(progress.step)
    if resume_from is not None:
        log.info("resuming from %s", resume_from.name)
    return progress.num_tokens


def _add_callbacks(
    trainer: Any,
    run_file: RunFile,
    pack: Pack,
    vocab_size: int,
    progress: Progress,
    heartbeat: Heartbeat,
    stop: StopRequest,
    tokens_before: int,
) -> None:
    spec = run_file.spec
    trainer.add_callback(
        HealthCallback(
            loss_is_finite=lambda: bool(trainer.loss_is_finite), vocab_size=vocab_size, loss_scaling=trainer.accelerator.scaler is not None
        )
    )
    trainer.add_callback(
        LoopCallback(
            progress=progress,
            heartbeat=heartbeat,
            metrics=MetricsLog(run_file.work_dir / "metrics.jsonl"),
            stop=stop,
            checkpointer=Checkpointer(run_file, trainer),
            policy=spec.checkpoint,
            validate=_validator(trainer, pack, stop),
            tokens_before=tokens_before,
        )
    )


def _validator(trainer: Any, pack: Pack, stop: StopRequest) -> Callable[[], float | None]:
    rows = [] if pack.validation is None else pack.validation.to_pylist()

    def validate() -> float | None:
        if not rows:
            return None
        return validation_loss(
            trainer.model,
            rows,
            collate=trainer.data_collator,
            loss=fused_loss(trainer.model),
            device=trainer.args.device,
            stop=lambda: stop.requested,
        )

    return validate


def _write_final(trainer: Any, run_file: RunFile, progress: Progress) -> None:
    require_finite(trainer.model)
    full = run_file.spec.adapter == "full"
    checkpoints.commit(
        run_file.work_dir / "final",
        lambda directory: save_weights(trainer.model, directory, base_model=run_file.spec.base_model),
        step=progress.step,
        attempt=run_file.attempt,
        spec_sha256=run_file.spec.sha256,
        created_at=time.time(),
        metrics={"num_tokens": progress.num_tokens},
        required=("*model*.safetensors", "config.json") if full else checkpoints.ADAPTER,
    )
