"""Compiles the stage's kernels once, so that no request waits for it later: part of set-up, and of building an image.

    python -m engine.data.warmup

numba's compiled code is kept beside the modules (or under ``NUMBA_CACHE_DIR``); if neither can be written, as in a container with a
read-only file system, every process would compile for itself.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from core.base_models import Catalogue
from engine.data.checks.contamination.overlap import SuiteIndex
from engine.data.ingest import Policies, validate_file
from engine.data.packs.build import build_pack
from engine.data.packs.pack_settings import PackSettings
from engine.data.tokens.chat_tokenizer import ChatTokenizer


def warm() -> None:
    """Sends a few rows through everything that is compiled: reading, duplicates, suites, packing."""
    text = " ".join(f"word{i}" for i in range(40))
    rows = [
        {"messages": [{"role": "user", "content": f"{i} {text}"}, {"role": "assistant", "content": f"{text} é {i}"}]} for i in range(40)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "rows.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        SuiteIndex.build({"warm": [text]}).save(Path(scratch) / "suites")
        stored = Path(scratch) / "rows.parquet"
        policies = Policies(min_examples=1, near_duplicates="warn", contamination="warn")  # every row resembles the others and the suite
        validate_file(path, filename=path.name, policies=policies, output=stored, suites=Path(scratch) / "suites")
        catalogue = Catalogue.load()
        directories = (catalogue.get(name).directory for name in catalogue.ids())
        if (directory := next((d for d in directories if d is not None), None)) is not None:  # a base model whose files are on this machine
            build_pack(stored, ChatTokenizer.load(directory), PackSettings(max_seq_len=256), Path(scratch) / "pack", dataset_id="warm")


if __name__ == "__main__":
    began = time.monotonic()
    warm()
    print(f"kernels compiled in {time.monotonic() - began:.1f} s")  # noqa: T201
