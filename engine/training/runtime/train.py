"""One attempt: from a run file to a finished adapter or model, or to a failure with its reason.

Imported only after ``imports.import_stack``; everything that can be checked without torch was checked before.
"""

from __future__ import annotations

import importlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import transformers
from transformers import set_seed

from core.errors import IntegrityError
from core.telemetry import spans
from engine.training import checkpoints, methods
from engine.training.checkpoints import TRAINER_STATE
from engine.training.data_order import DataOrder
from engine.training.runtime import collectives, parallel
from engine.training.runtime.checkpoint_writer import Saver
from engine.training.runtime.loop import Loop, RunState
from engine.training.runtime.model import pissa, precision, split_windows
from engine.training.runtime.model.compilation import compile_blocks
from engine.training.runtime.model.split_windows import Context
from engine.training.runtime.model.weights import choice_of_attention, load_base, require_finite, start_warm, whole_start
from engine.training.runtime.objectives import Ingredients, Objective
from engine.training.runtime.pack_loader import Pack
from engine.training.runtime.parallel import Strategy, checkpoint_exchange
from engine.training.runtime.run_errors import BadInput
from engine.training.runtime.status_files import Heartbeat, MetricsLog, Progress
from engine.training.runtime.stop_request import StopRequest
from engine.training.runtime.topology import Topology
from engine.training.spec import RunFile, TrainingSpec

log = logging.getLogger(__name__)

FINAL_PARTS = {"adapter": checkpoints.ADAPTER, "model": ("model*.safetensors", "config.json")}


def run(run_file: RunFile, pack: Pack, *, vocab_size: int, progress: Progress, heartbeat: Heartbeat, stop: StopRequest) -> dict[str, Any]:
    """Trains to the end and writes ``final/``; returns additional exit evidence. Raises a ``RunEnded`` otherwise."""
    spec = run_file.spec
    heartbeat.enter("load")
    deterministic(spec.seed)
    strategy = parallel.build(spec)
    with spans.span("load"):
        strategy.start()
        objective = build_objective(run_file, pack, strategy, context=split_windows.join(spec), touch=progress.touch)
    order = DataOrder.of(spec, *pack.train.rows_of_packs)
    progress.total_steps = spec.total_steps(num_rows=order.num_rows)
    kernels = _kernels(objective.model, spec, strategy.device, total_steps=progress.total_steps)
    strategy.wrap(objective.model, total_steps=progress.total_steps)

    heartbeat.enter("self_test")
    with spans.span("self-test"), precision.evaluation(spec, strategy.device):
        tested = objective.self_test(strategy.model)
    log.info("self-test: %s", ", ".join(f"{k} {v:.3g}" for k, v in tested.items()))

    heartbeat.enter("setup")  # reading a large checkpoint takes as long as loading a large model
    saver = Saver(run_file, strategy, Topology.of_environment(), touch=progress.touch)
    metrics = MetricsLog(run_file.work_dir / "metrics.jsonl")
    loop = Loop(
        spec,
        order=order,
        objective=objective,
        strategy=strategy,
        saver=saver,
        metrics=metrics,
        progress=progress,
        heartbeat=heartbeat,
        stop=stop,
        vocab_size=vocab_size,
    )
    with spans.span("restore") as restoring:
        resumed = _resume(run_file, strategy, saver, loop)
        restoring.set(ft__step=loop.state.step)
    if strategy.rank == 0:
        metrics.keep_through(loop.state.step)
    with spans.span("train", ft__total_steps=progress.total_steps):
        loop.run()

    heartbeat.enter("save")
    with spans.span("final"):
        kept = _return_to_best(run_file, strategy, saver, loop)
        require_finite(objective.model)
        _write_final(run_file, strategy, saver.here, progress, kept, kernels)
    return {
        "self_test": dict(tested),
        "kernels": kernels,
        "resumed_from": resumed,
        "ended_early": progress.ended_early,
        "kept_step": kept,
        "best_step": loop.state.best_step,
        "best_eval_loss": loop.state.best_eval_loss,
        "strategy": dict(strategy.evidence()),
        "checkpoint_stall_s": round(saver.stall_s, 3),
    }


def _kernels(model: Any, spec: TrainingSpec, device: torch.device, *, total_steps: int) -> dict[str, Any]:
    """Compiles blocks where that pays, and returns how this run computes, each choice with its reason."""
    chosen = choice_of_attention(spec, device, model.config)
    compiled = compile_blocks(model, spec, device, total_steps=total_steps)
    found = {
        "attention": chosen.kernel,
        "attention_reason": chosen.reason,
        "compiled_blocks": compiled.blocks,
        "compiled_blocks_reason": compiled.reason,
        "context_parallel": spec.context_parallel,
    }
    log.info("kernels: %s", ", ".join(f"{name} {value}" for name, value in found.items()))
    return found


def build_objective(
    run_file: RunFile, pack: Pack, strategy: Strategy, *, context: Context | None = None, touch: Callable[[], None] = lambda: None
) -> Objective:
    """Builds the method's objective over the loaded base model, with the initial weights. `context`: ranks that share windows with this
    one."""
    spec, device = run_file.spec, strategy.device
    base, tokenizer = load_base(
        run_file.base_model_dir, spec, device=device, load_part=strategy.load_part, context=context, weights_dir=whole_start(run_file)
    )
    module, _, name = methods.method_named(spec.method).objective.partition(":")
    build = getattr(importlib.import_module(module), name)
    set_seed(spec.seed)  # seeds the adapter's initial weights
    given = Ingredients(run=run_file, spec=spec, pack=pack, base=base, tokenizer=tokenizer, device=device, context=context)
    objective = cast(Objective, build(given))
    if spec.lora is not None:
        pissa.begin(objective.model, spec.lora, touch=touch)
    start_warm(objective.model, run_file)
    precision.leave_casts_to_autocast(objective.model, spec, device)
    return objective


def deterministic(seed: int) -> None:
    """Makes results reproducible by seed, and keeps progress bars and deprecation notices out of the tenant's log.

    On a GPU an operation without a deterministic form raises: if it only warned, attention would use the faster backward pass, whose sums
    come in any order.
    """
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", UserWarning)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.use_deterministic_algorithms(True, warn_only=not torch.cuda.is_available())
    # Filling fresh memory is a debugging aid that costs a fifth of a step on a CPU; it does not affect results.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    set_seed(seed)


def _resume(run_file: RunFile, strategy: Strategy, saver: Saver, loop: Loop) -> str | None:
    """Loads the newest checkpoint from which the run resumes exactly; returns its name, or None to start from the beginning.

    The first node has it, and the others get it from there. Newer ones, damaged or of another training, are removed: they would count as
    the newest.
    """
    directory, here = run_file.work_dir / "checkpoints", saver.here
    collectives.reduce_sum([0.0], strategy.device)  # rank 0 first completes a rename that a crash interrupted, before others look
    step = 0 if here.node else _newest(run_file, saver)
    (agreed,) = collectives.reduce_sum([0.0 if here.rank else float(step)], strategy.device)
    if here.node == 0 and agreed != step:
        raise BadInput(
            f"ranks do not see the same checkpoints (step {step} and step {agreed:.0f}); {directory} must be shared by all of a node"
        )
    if here.leads_node:
        checkpoints.set_aside_newer(directory, int(agreed))
    if not agreed:
        return None
    found = directory / checkpoints.step_name(int(agreed))
    if here.num_nodes > 1 and not checkpoint_exchange.bring(found, here, strategy.device):
        raise BadInput(f"{found.name} could not be brought to every node of the gang")
    state = json.loads((found / TRAINER_STATE).read_text())
    strategy.load(found)
    last = state.pop("last")
    loop.resume(RunState(**state), last)
    log.info("resuming from %s", found.name)
    return found.name


def _newest(run_file: RunFile, saver: Saver) -> int:
    """Step of the newest checkpoint on this node from which the run resumes exactly; 0 for none."""
    found = checkpoints.latest_valid_checkpoint(
        run_file.work_dir / "checkpoints",
        run_file.spec,
        required=saver.parts,
        on_skip=lambda path, why: log.warning("skipped %s: %s", path.name, why),
    )
    return 0 if found is None else checkpoints.read_manifest(found).step


def _return_to_best(run_file: RunFile, strategy: Strategy, saver: Saver, loop: Loop) -> int:
    """After an early stop, loads the weights of the best validation if its checkpoint exists; returns the step of the kept weights."""
    best = loop.state.best_step
    if not loop.progress.ended_early or best in (None, loop.state.step):
        return loop.state.step
    directory, here = run_file.work_dir / "checkpoints" / checkpoints.step_name(int(best or 0)), saver.here
    try:
        if here.num_nodes > 1 and not checkpoint_exchange.bring(directory, here, strategy.device):
            raise IntegrityError(f"{directory.name} could not be brought to every node of the gang")
        checkpoints.verify_checkpoint(directory, required=saver.parts)
    except IntegrityError as e:
        log.warning("the best validation was at step %d, but its checkpoint cannot be used; the last weights are kept: %s", best, e.message)
        return loop.state.step
    strategy.load(directory)
    log.info("the weights of step %d, the best validation, are kept", best)
    return int(best or 0)


def _write_final(run_file: RunFile, strategy: Strategy, here: Topology, progress: Progress, step: int, kernels: Mapping[str, Any]) -> None:
    spec = run_file.spec
    target = run_file.work_dir / "final"
    draft = checkpoints.begin(target, token=f"a{run_file.attempt}") if here.node == 0 else target  # only rank 0 writes
    strategy.save_weights(draft, base_model=spec.base_model)
    if strategy.rank:
        return
    if spec.lora is not None:
        pissa.finish(draft, spec.lora)
    facts = {"step": step, "attempt": run_file.attempt, "created_at": time.time(), "metrics": {"num_tokens": progress.num_tokens}}
    facts["kernels"] = kernels
    manifest = checkpoints.CheckpointManifest.of(spec, required=FINAL_PARTS["model" if spec.adapter == "full" else "adapter"], **facts)
    checkpoints.seal(draft, target, manifest)
