"""``python -m engine.adapters check DIR --base DIR``: whether servers can load a LoRA adapter on a base model, and every reason why not.

Exit code 0 if they can, 1 if not.
"""

import argparse
import sys
from pathlib import Path

from core.base_models import MAX_RANK
from core.errors import IntegrityError
from engine.adapters.package import ADAPTER_CONFIG, read_package, verify_package
from engine.adapters.tensors import weight_shapes


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.adapters")
    commands = parser.add_subparsers(required=True)
    check = commands.add_parser("check", help="check the files of an adapter against its base model")
    check.add_argument("directory", type=Path, help="with adapter_config.json and adapter_model.safetensors, as PEFT saves them")
    check.add_argument("--base", type=Path, required=True, help="directory of the base model")
    check.add_argument("--max-rank", type=int, default=MAX_RANK, help="highest rank that the servers load (default: %(default)s)")
    args = parser.parse_args(argv)
    if not (args.directory / ADAPTER_CONFIG).is_file():
        parser.error(f"{args.directory} holds no {ADAPTER_CONFIG}")
    try:
        named = str(read_package(args.directory).config.get("base_model_name_or_path"))
    except IntegrityError as error:
        sys.stdout.write(f"unreadable: {error.message}\n")
        return 1
    refusals = verify_package(args.directory, base_shapes=weight_shapes(args.base), served_name=named, max_rank=args.max_rank)
    sys.stdout.write("".join(f"{refusal.code}: {refusal.detail}\n" for refusal in refusals) or "servable\n")
    return 1 if refusals else 0


if __name__ == "__main__":
    sys.exit(main())
