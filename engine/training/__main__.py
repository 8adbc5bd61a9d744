"""``python -m engine.training plan MODEL``: how a job of a well-known model would train, on how many GPUs, and what fills their memory.

Exit code 1 with the reason and what would help if it fits on none.
"""

import argparse
import sys

from core.errors import InvalidRequest
from engine.training.cost_model import GPU_SPEEDS, micro_batch_s
from engine.training.hyperparameters import ModelFacts, plan
from engine.training.memory import GPUS, Case, Placement
from engine.training.model_shapes import WELL_KNOWN_SHAPES, well_known_shape
from engine.training.recipes import ADAPTER_KINDS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.training")
    commands = parser.add_subparsers(required=True)
    planned = commands.add_parser("plan", help="recipe, window length, GPUs and memory of a job")
    planned.add_argument("model", help=f"one of {', '.join(WELL_KNOWN_SHAPES)}")
    planned.add_argument("--adapter", choices=ADAPTER_KINDS, default="lora")
    planned.add_argument("--method", default="sft")
    planned.add_argument("--gpu", choices=sorted(GPU_SPEEDS), default="h100-80gb")
    planned.add_argument("--max-gpus", type=int, default=32)
    planned.add_argument("--max-seq-len", type=int)
    args = parser.parse_args(argv)
    if (shape := well_known_shape(args.model)) is None:
        parser.error(f"{args.model} is not known; use one of: {', '.join(WELL_KNOWN_SHAPES)}")
    facts = ModelFacts(id=args.model, digest="", num_parameters=shape.num_parameters, context_length=131_072)
    requested = {} if args.max_seq_len is None else {"max_seq_len": args.max_seq_len}
    try:
        chosen = plan(requested, facts, method=args.method, adapter=args.adapter)
        case = Case(
            shape=shape, adapter=args.adapter, method=args.method, precision=chosen.precision, max_seq_len=chosen.max_seq_len,
            gradient_checkpointing=chosen.max_seq_len > 1024,
        )  # fmt: skip
        placement = Placement(
            gpu=GPUS[args.gpu], max_gpus=args.max_gpus, global_batch=64,
            micro_batch_s=lambda tried: micro_batch_s(tried, args.gpu, tokens=tried.tokens),
        )  # fmt: skip
        fit = placement.fit(case)
    except InvalidRequest as error:
        sys.stdout.write(f"{error.message}\n")
        return 1
    gib = {name: value / (1 << 30) for name, value in fit.estimate.parts.items() if value}
    sys.stdout.write(
        f"recipe {chosen.recipe.name}, windows of {chosen.max_seq_len} tokens, {chosen.precision}\n"
        f"{fit.num_gpus} x {args.gpu}, strategy {fit.strategy}, {fit.per_device_batch_size} windows a GPU\n"
        f"memory {fit.estimate.total_bytes / (1 << 30):.1f} GiB a GPU: "
        + ", ".join(f"{name} {value:.1f}" for name, value in gib.items())
        + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
