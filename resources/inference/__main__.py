"""``python -m resources.inference --model-dir DIR --served-name NAME``: serve a base model and its adapters."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from control_plane.platform import settings
from control_plane.platform.secrets import inference_token
from core.base_models import MAX_RANK, model_digest
from core.telemetry import logs
from engine.adapters import weight_shapes
from resources import http_server

UNUSED = ("scipy", "boto3")
"""Hidden from transformers and accelerate, which import these if they are installed: 35 MiB of unused memory."""

SWITCH_S = 0.0001
"""Python's default is fifty times that: so long the engine's thread may wait after each of some hundred operations of a step, while the
event loop writes. With 24 answers under way, 0.1 ms instead of 0.5 ms takes a fifth off the time to another's first token."""


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then finish requests in flight for up to 10 s.

    Callers send the installation's token: ``FT_INFERENCE_TOKEN``, or the one in ``FT_HOME``.
    """
    args = _parser().parse_args(argv)
    logs.configure("ft-inference")
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    import torch

    from resources.inference.engine.engine_thread import Engine
    from resources.inference.server import Server, create_app

    torch.set_num_threads(args.threads)
    sys.setswitchinterval(SWITCH_S)
    digest = model_digest(args.model_dir)  # before the weights are read: adapters are served only on the base they were trained on
    engine = Engine(args.model_dir, max_batch=args.max_batch)
    server = Server(
        engine,
        served_name=args.served_name,
        base_shapes=weight_shapes(args.model_dir),
        max_resident=args.max_adapters,
        max_rank=args.max_lora_rank,
        base_digest=digest,
    )
    try:
        app = create_app(server, token=inference_token(settings.load()))
        http_server.run(app, host=args.host, port=args.port, log_level="warning", log_config=None, timeout_graceful_shutdown=10)
    finally:
        engine.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m resources.inference", description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True, help="directory of the base model (safetensors)")
    parser.add_argument("--served-name", required=True, help="id of the base model, as adapters and requests name it")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the engine")
    parser.add_argument("--max-batch", type=int, default=32, help="requests answered together")
    parser.add_argument("--max-adapters", type=int, default=32, help="adapters kept in memory; others are read again when asked for")
    parser.add_argument("--max-lora-rank", type=int, default=MAX_RANK)
    return parser


if __name__ == "__main__":
    main()
