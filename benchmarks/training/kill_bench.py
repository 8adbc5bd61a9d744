"""A platform in a directory with a database server, an API and a worker of its own, all of which may be killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from control_plane.composition import open_platform
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.queue_entry import mark_packed
from control_plane.jobs.submission import JobRequest
from control_plane.platform import settings as settings_module
from control_plane.platform.context import Platform
from control_plane.platform.transfer import upload
from control_plane.tenants import service as tenants
from core import layout
from engine.data.packs.manifest import PackManifest
from engine.training.spec import CheckpointPolicy, Optimization
from resources.database import embedded, migrate
from resources.database.engine import make_engine
from tests.engine.training.attempts import SPEC, write_pack
from tests.support.models.tiny_model import build_tiny_model

REPOSITORY = Path(__file__).resolve().parents[2]
EVERY_STEPS = 5
WINDOWS, BATCH, ACCUMULATION, LENGTH = 40, 2, 4, 256
QUICK = {"fsync": "off", "full_page_writes": "off"}
"""The machine does not lose power here."""


@dataclass(kw_only=True)
class Bench:
    platform: Platform
    env: Mapping[str, str]
    pack: Path
    home: Path
    services: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def keep_up(self) -> None:
        """Start the API and the worker, and start again what has ended, the database first."""
        if embedded.postmaster(self.postgres) is None:
            embedded.start(self.postgres, databases=("ft",), config=QUICK)
        for name in ("api", "worker"):
            if name not in self.services or self.services[name].poll() is not None:
                with (self.home / f"{name}.log").open("ab") as log:
                    self.services[name] = subprocess.Popen(
                        [sys.executable, "-m", f"control_plane.{name}"], env={**os.environ, **self.env}, cwd=REPOSITORY,
                        stdout=log, stderr=subprocess.STDOUT,
                    )  # fmt: skip

    @property
    def postgres(self) -> Path:
        return self.home / "postgres"

    def end(self) -> None:
        for service in self.services.values():
            service.kill()
            service.wait()

    def submit(self, epochs: int) -> tuple[str, str]:
        """A queued job of a tenant of its own: an identical spec of the same tenant would be answered with the first one's adapter."""
        owner, _ = tenants.create(self.platform, f"t-{random.randrange(16**8):08x}", tier="standard")
        rows = self.home / "rows.jsonl"
        rows.write_text("".join(f"{json.dumps({'messages': _turns(i)})}\n" for i in range(120)))
        with rows.open("rb") as stream:
            file = uploaded_files.create(self.platform, owner.id, stream, filename="rows.jsonl", purpose="fine-tune")
        job = jobs.submit(self.platform, owner.id, JobRequest.from_body({"model": "tiny-base", "training_file": file.id})).job
        spec = replace(
            SPEC,
            base_model="tiny-base",
            base_digest=self.platform.models.get("tiny-base").digest,
            max_seq_len=LENGTH,
            optimization=Optimization(
                learning_rate=1e-2, num_epochs=epochs, per_device_batch_size=BATCH, accumulation_steps=ACCUMULATION, schedule="cosine"
            ),
            checkpoint=CheckpointPolicy(every_steps=EVERY_STEPS, every_s=600, keep_last=3),
        )
        upload(self.platform.objects, self.pack, layout.pack_prefix(owner.id, spec.pack_fingerprint))
        mark_packed(self.platform, owner.id, job.id, spec=spec, total_steps=total_steps(epochs), expected_s=60.0)
        return owner.id, job.id


def total_steps(epochs: int) -> int:
    return epochs * WINDOWS // (BATCH * ACCUMULATION)


def _turns(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {number} plus {number}?"}, {"role": "assistant", "content": f"It is {2 * number}."}]


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    """A platform with a database server of its own; all of it goes with the block."""
    home = Path(tempfile.mkdtemp(prefix="ft-kills-"))
    server = embedded.start(home / "postgres", databases=("ft",), config=QUICK)
    try:
        url = embedded.socket_url(home / "postgres", "ft")
        engine = make_engine(url)
        migrate.upgrade(engine)
        engine.dispose()
        model = build_tiny_model(home / "base")
        entry = {"id": "tiny-base", "path": str(model), "license": "Apache-2.0"}
        (home / "models.yaml").write_text(json.dumps({"models": [entry]}))
        env = {
            "FT_HOME": str(home / "ft"),
            "FT_DATABASE_URL": url,
            "FT_BASE_MODELS": str(home / "models.yaml"),
            "FT_INFERENCE_URLS": "http://127.0.0.1:9",
            "FT_MLFLOW_URI": "off",
            "FT_API_PORT": str(free_port()),
        }
        platform = open_platform(settings_module.load(env))
        made = Bench(platform=platform, env=env, pack=_pack(home / "pack"), home=home)
        try:
            made.keep_up()
            yield made
        finally:
            made.end()
        platform.logins.dispose()
    finally:
        embedded.stop(server)
        shutil.rmtree(home, ignore_errors=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _pack(directory: Path) -> Path:
    write_pack(directory, num_windows=WINDOWS, length=LENGTH, validation=4)
    body: dict[str, Any] = {
        "num_trained_tokens": WINDOWS * LENGTH // 2,
        "truncated": 0,
        "settings": {},
        "dropped": {},
        "dropped_rows": {},
        "lengths": {},
        "rows": {},
        "tokenizer_digest": "0",
        "template_digest": "0",
    }
    PackManifest(fill=1.0, **body, **json.loads((directory / "manifest.json").read_text())).write(directory)
    return directory
