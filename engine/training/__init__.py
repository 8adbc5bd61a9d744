"""Training: from a request to a plan, a spec, and a process on the GPU (``python -m engine.training.runtime``); see README.md."""

from typing import TYPE_CHECKING

from core.doors import lazily

if TYPE_CHECKING:
    from engine.training.checkpoints import (
        CHECKPOINT_MANIFEST,
        TRAINER_STATE,
        CheckpointManifest,
        CheckpointPart,
        check_checkpoint_parts,
        checkpoint_parts,
        committed_checkpoints,
        discard_draft,
        encoded_manifest,
        is_sharded,
        latest_valid_checkpoint,
        manifest_digest,
        merged_manifest,
        parse_manifest,
        part_manifest,
        read_manifest,
        recover_checkpoints,
        set_aside_newer,
        step_name,
        verify_checkpoint,
        verify_checkpoint_for,
        verify_checkpoint_part,
    )
    from engine.training.cost_model import GPU_SPEEDS, READ_BYTES_PER_S, SETUP_S, Cost, micro_batch_s, training_cost
    from engine.training.disk_space import NO_SPACE, free_bytes, is_disk_full
    from engine.training.failures import (
        Evidence,
        ExitEvidence,
        FailureClass,
        Outcome,
        PastAttempt,
        Retry,
        StopReason,
        classify_failure,
        lost_another_rank,
        with_half_batch,
    )
    from engine.training.hyperparameters import ModelFacts, PackFacts, Plan, global_batch_size, min_windows, packs_windows, plan, resolve
    from engine.training.loss_curve import loss_curve_svg
    from engine.training.memory import GANG_SIZES, GPUS, Case, Fit, Placement
    from engine.training.memory.forward_pass import forward_pass_gpus
    from engine.training.memory.gpus import CONTEXT_BYTES, GIB
    from engine.training.methods import Limit, Method, method_named, registered_methods
    from engine.training.model_shapes import WELL_KNOWN_SHAPES, ModelShape, shape_of, well_known_shape
    from engine.training.model_shapes.context_split import CONTEXT_SIZES, context_objection
    from engine.training.pack_stream import ARRIVING, arrival_order
    from engine.training.recipes import ADAPTER_KINDS, AdapterKind, Recipe, load_recipes, parse_recipes, recipe_named, select_recipe
    from engine.training.reference_logps import REFERENCE_MANIFEST, quantization_label, reference_key_for
    from engine.training.requested_hyperparameters import (
        EXPERT_SETTINGS,
        HARDWARE_LIMITS,
        HYPERPARAMETER_LIMITS,
        PACK_SETTINGS,
        bad_setting,
        check_placement,
        checked_hardware,
        checked_hyperparameters,
        splitting_objections,
    )
    from engine.training.schedules import describe_schedule
    from engine.training.spec import CheckpointPolicy, LoraSettings, Quantization, Source, TrainingSpec, WarmStart, canonical_json
    from engine.training.stored_specs import openai_hyperparameters, stored_batch_size

__getattr__, __dir__ = lazily(__name__)
