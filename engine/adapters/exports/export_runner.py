"""The export process: ``python -m engine.adapters.exports.export_runner RUN.json``.

The run file holds an order, the directories of base and adapter, and ``out_dir``. Leaves there the archive, ``eval-result.json`` with its
size and sha256, its manifest and the sha256 of ``manifest.json``, or with an ``error``, and every second a heartbeat with the stage. Exit
codes as of an evaluation (:mod:`engine.evals.run.run_status`).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from core.durable_files import sha256_of, write_json
from core.errors import FtError, InvalidRequest
from core.telemetry import logs
from core.typed_json import from_json
from engine.adapters.exports.archive import ExportOrder, build_export
from engine.evals import EVAL_EXIT_BAD_INPUT, EVAL_EXIT_INTERNAL, EVAL_EXIT_OK, HEARTBEAT_NAME, RESULT_NAME

SERVICE = "ft-export"
ARCHIVE = "export.tar"
BEAT_S = 1.0

log = logging.getLogger("engine.adapters.exports.export_runner")


def main(argv: Sequence[str]) -> int:
    """Makes the export that the run file describes; see the module for exit codes."""
    run = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    out_dir = Path(run["out_dir"])
    (out_dir / RESULT_NAME).unlink(missing_ok=True)  # of an earlier process: this one leaves its own
    scratch = out_dir / "work"
    shutil.rmtree(scratch, ignore_errors=True)  # of an earlier process
    scratch.mkdir(parents=True)
    tempfile.tempdir = str(scratch)  # a whole model passes through it, and /tmp may be small
    stage = ["starting"]
    threading.Thread(target=_beat, args=(out_dir, stage), daemon=True).start()
    try:
        order = from_json(ExportOrder, {**run["order"], "base_dir": run["base_model_dir"], "adapter_dir": run["adapter_dir"]})
        built = build_export(order, scratch, say=lambda message: stage.__setitem__(0, message))
        archive = built.archive.replace(out_dir / ARCHIVE)
        described = {"manifest": built.manifest, "manifest_sha256": built.manifest_sha256}
        write_json(out_dir / RESULT_NAME, {"bytes": archive.stat().st_size, "sha256": sha256_of(archive), **described})
        return EVAL_EXIT_OK
    except FtError as error:
        log.info("%s: %s", error.code, error)
        write_json(out_dir / RESULT_NAME, {"error": error.to_dict()})
        return EVAL_EXIT_BAD_INPUT if isinstance(error, InvalidRequest) else EVAL_EXIT_INTERNAL
    except Exception:
        log.exception("the export failed")
        return EVAL_EXIT_INTERNAL
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _beat(out_dir: Path, stage: Sequence[str]) -> None:
    """Writes the stage every second, so that a computing library counts as progress."""
    started = time.monotonic()
    while True:
        write_json(out_dir / HEARTBEAT_NAME, {"time": time.time(), "phase": stage[0], "seconds": int(time.monotonic() - started)})
        time.sleep(BEAT_S)


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    logs.configure(SERVICE, plain=True)
    sys.exit(main(sys.argv[1:]))
