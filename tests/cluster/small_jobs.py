"""Jobs that train the tiny model within a minute, and how they ended."""

from __future__ import annotations

import sqlalchemy as sa

from control_plane.attempts.tables import attempts
from tests.cluster.installed_platform import Installed, Manifest, Tenant, until

EVALUATION = {"skip": ["golden", "task", "perplexity"], "max_items": 4, "max_new_tokens": 8}
ROWS = [
    {"messages": [{"role": "user", "content": f"What is {n} plus {n}?"}, {"role": "assistant", "content": f"It is {2 * n}."}]}
    for n in range(600)
]


def spec(steps: int = 60, *, num_gpus: int = 1, batch: int = 2, every: int = 10) -> Manifest:
    """Fields of a job whose training takes `steps` steps."""
    hyperparameters = {"n_epochs": 50, "max_steps": steps, "batch_size": batch, "checkpoint_every_steps": every, "attention": "sdpa"}
    return {
        "method": "lora", "hyperparameters": hyperparameters, "eval_config": EVALUATION, "seed": 5, "auto_promote": False,
        "hardware": {"num_gpus": num_gpus},
    }  # fmt: skip


def outcomes(cluster: Installed, job_id: str) -> list[str]:
    """How the job's trainings ended; those of evaluations have no first step."""
    query = sa.select(attempts.c.outcome).where(attempts.c.job_id == job_id, attempts.c.from_step.is_not(None))
    with cluster.engine.connect() as conn:
        return list(conn.execute(query.order_by(attempts.c.attempt)).scalars())


def at_step(tenant: Tenant, job_id: str, step: int) -> None:
    until(lambda: (tenant.job(job_id)["step"] or 0) >= step, limit_s=300, what=f"step {step} of {job_id}")
