"""Caches keep what was used lately, and what a job links to."""

from __future__ import annotations

import os
import time
from pathlib import Path

from core import durable_files


def test_what_was_not_used_for_a_day_leaves_a_cache_unless_a_job_links_to_it(tmp_path: Path) -> None:
    cache = tmp_path / "inputs"
    for name in ("acme/used", "acme/unused", "acme/linked", "rival/unused_pack/shard-0", "rival/used_pack/shard-0"):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(b"0")
    (tmp_path / "job").hardlink_to(cache / "acme" / "linked")
    long_ago = time.time() - durable_files.KEPT_UNUSED_S - 60
    for path in cache.glob("*/*"):
        os.utime(path, (long_ago, long_ago))
    for name in ("acme/used", "rival/used_pack"):
        durable_files.mark_used(cache / name)

    durable_files.remove_unused(cache)

    assert sorted(str(path.relative_to(cache)) for path in cache.glob("*/*")) == ["acme/linked", "acme/used", "rival/used_pack"]
    assert (cache / "rival" / "used_pack" / "shard-0").exists()
