"""What the agent of an attempt does not upload: the rest of a cancelled job's model, and a reference that it was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from agent.messages import WriteGrant
from control_plane.attempts.tables import agents as agents_table
from control_plane.jobs import service as jobs
from control_plane.platform.job_states import JobState
from core import layout
from engine.training.checkpoints import CHECKPOINT_MANIFEST
from engine.training.reference_logps import ReferenceManifest, write_logps
from resources.object_store import LocalObjectStore
from tests.support.jobs.followed_jobs import Job, until
from tests.support.jobs.training_specs import SPEC
from tests.support.processes.scripted_training import Scenario


class Meanwhile(LocalObjectStore):
    """A store that does something else before it takes a file of a finished model."""

    meanwhile: Callable[[], None]

    def begin_upload(self, key: str, part_sha256: Sequence[str], upload_id: str | None = None) -> WriteGrant:
        if "/final/" in key:
            self.meanwhile()
        return super().begin_upload(key, part_sha256, upload_id)


def test_a_job_that_is_cancelled_while_its_finished_model_is_stored_stores_no_more_of_it(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    store = Meanwhile(tmp_path / "objects")
    job = new_job(store)

    def num_beats() -> int:
        with job.platform.engine.connect() as conn:
            return int(conn.execute(sa.select(agents_table.c.beat).where(agents_table.c.job_id == job.id)).scalar_one())

    def cancel() -> None:
        jobs.cancel(job.platform, job.tenant, job.id)
        before = num_beats()
        until(lambda: num_beats() >= before + 2)

    store.meanwhile = cancel
    ending, state = job.train(Scenario(steps=4))
    assert (ending.outcome, state) == ("cancelled", JobState.CANCELLED)
    stored = [info.key for info in store.list(f"{layout.job_prefix(job.tenant, job.id)}/final")]
    assert [key.split("/")[-1] for key in stored] == ["adapter_config.json"], "the one on its way when the agent heard of it"


@pytest.mark.slow
def test_a_resumed_attempt_stores_no_reference_again_that_it_was_given(new_job: Callable[..., Job]) -> None:
    job = new_job(reference="rf_0123456789")
    rows, directory = np.arange(5), job.work_dir / "reference"
    directory.mkdir(parents=True)
    scores = write_logps(directory, "shard-00000.parquet", {"row": rows, "chosen_logp": rows * -1.0, "rejected_logp": rows * -2.0})
    ReferenceManifest(
        key="rf_0123456789", pack_fingerprint=SPEC.pack_fingerprint, base_digest="d", precision="fp32", attention="sdpa", kind="pairs",
        quantization=None, files=(scores,),
    ).write(directory)  # fmt: skip
    job.train(Scenario(steps=8, end_at={"step": 5, "outcome": "kill", "attempt": 1}))
    assert job.train(Scenario(steps=8))[1] is JobState.EVALUATING
    prefix = layout.reference_prefix(job.tenant, "rf_0123456789")
    stored = sorted(info.key.removeprefix(f"{prefix}/").split("/")[0] for info in job.platform.objects.list(prefix))
    assert stored == [f"{job.id}-a1", CHECKPOINT_MANIFEST], "the second attempt added none"
