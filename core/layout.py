"""Builds all object keys. Every object of a tenant is under ``tenants/<tenant>/``.

    tenants/<t>/files/<file_id>/<filename>                     bytes as uploaded
    tenants/<t>/uploads/<upload_id>/<part_id>                  a part of a multipart upload, until it is complete
    tenants/<t>/datasets/<dataset_id>/{rows.parquet, report.json, dataset.json}
    tenants/<t>/packs/<fingerprint>/{shard-00000.parquet, ..., manifest.json}
    tenants/<t>/references/<key>/{ref-shard-00000.parquet, ..., manifest.json}   log-probabilities of a pack's answers
    tenants/<t>/jobs/<job>/checkpoints/a1/step-00000500/...    checkpoints, each committed by a row
    tenants/<t>/jobs/<job>/attempts/a1/train.log               output of a finished attempt
    tenants/<t>/jobs/<job>/attempts/a1/log/<from>              pieces of the output of a running attempt
    tenants/<t>/jobs/<job>/final/a1/...                        finished adapter of an attempt, until it is registered
    tenants/<t>/jobs/<job>/evals/report.json
    tenants/<t>/adapters/<adapter_id>/{adapter_model.safetensors, ..., manifest.json}
    tenants/<t>/adapters/<adapter_id>/evaluations/<id>/report.json   of the registered adapter, on any base
    tenants/<t>/exports/<adapter_id>/<key>.tar                 exported adapter; of a workload, the key is <export_id>-a<attempt>
    tenants/<t>/suites/<suite_id>.jsonl                        items of the tenant's evaluation suite
    tenants/<t>/scored_suites/<suite_id>.jsonl                 items of a version of the tenant's scored suite
    tenants/<t>/suite_indexes/<digest>/...                     index over the suites that the tenant's datasets are checked against
    tenants/<t>/mlflow/<run>/artifacts/...                     files of a run in MLflow
    tenants/<t>/dagster/<run>/compute_logs/<step>.{out,err}    output of the platform's own steps
    dagster/...                                                output of sensors, without a tenant
    base_models/<digest>/{config.json, model.safetensors, ...}   without a tenant: what workloads on any node load
    suites/<suite_id>.jsonl                                    items of an operator's suite, without a tenant

Identifiers are validated here before they are used in a path: a key from this module cannot leave its prefix.
"""

from __future__ import annotations

import re
import unicodedata

from core.errors import InvalidRequest

STEP_LOGS = "dagster"
"""Directory of the output of Dagster's steps, below a tenant's prefix; without a tenant, that of what belongs to none."""
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
JOINERS = "\u200c\u200d"
"""Invisible characters that scripts and emoji need inside a word."""
FILENAME = re.compile(r"[A-Za-z0-9._ ()+@=,-]{1,255}")


def checked_id(value: str, *, what: str = "id") -> str:
    """Returns `value` if it is safe as one path segment; refuses it otherwise."""
    if not ID.fullmatch(value):
        raise InvalidRequest(
            f"{what} {value[:80]!r} is not valid: use letters, digits, '_' and '-', at most 128, starting with a letter or digit",
            code="invalid_id",
            param=what,
        )
    return value


def safe_filename(name: str) -> str:
    """Returns `name` reduced to its last segment and to characters that are safe in a key."""
    last = name.replace("\\", "/").rsplit("/", 1)[-1].lstrip(".")
    cleaned = "".join(c if FILENAME.fullmatch(c) else "_" for c in last)[-255:]
    return cleaned or "file"


def shown_filename(name: str) -> str:
    """Returns `name` reduced to its last segment, in any script; characters that could forge a path, a line or a direction are ``_``."""
    last = unicodedata.normalize("NFC", name).replace("\\", "/").rsplit("/", 1)[-1].lstrip(".")
    return "".join(c if _is_shown(c) else "_" for c in last)[-255:] or "file"


def _is_shown(character: str) -> bool:
    if character.isascii():
        return FILENAME.fullmatch(character) is not None
    category = unicodedata.category(character)
    return category[0] not in "CZ" or category == "Zs" or character in JOINERS


def tenant_prefix(tenant: str) -> str:
    return f"tenants/{checked_id(tenant, what='tenant')}"


def tenant_of(key: str) -> str | None:
    """Return the tenant under whose prefix an object is."""
    root, _, rest = key.partition("/")
    tenant, slash, _ = rest.partition("/")
    return tenant if root == "tenants" and slash else None


def file_key(tenant: str, file_id: str, filename: str) -> str:
    return f"{tenant_prefix(tenant)}/files/{checked_id(file_id)}/{safe_filename(filename)}"


def upload_prefix(tenant: str, upload_id: str) -> str:
    return f"{tenant_prefix(tenant)}/uploads/{checked_id(upload_id)}"


def part_key(tenant: str, upload_id: str, part_id: str) -> str:
    return f"{upload_prefix(tenant, upload_id)}/{checked_id(part_id)}"


def dataset_prefix(tenant: str, dataset_id: str) -> str:
    return f"{tenant_prefix(tenant)}/datasets/{checked_id(dataset_id)}"


def suite_key(tenant: str | None, suite_id: str) -> str:
    """Key of a suite's items; without a tenant it is the operator's."""
    root = "suites" if tenant is None else f"{tenant_prefix(tenant)}/suites"
    return f"{root}/{checked_id(suite_id)}.jsonl"


def scored_suite_key(tenant: str, suite_id: str) -> str:
    return f"{tenant_prefix(tenant)}/scored_suites/{checked_id(suite_id)}.jsonl"


def suite_index_prefix(tenant: str, digest: str) -> str:
    return f"{tenant_prefix(tenant)}/suite_indexes/{checked_id(digest)}"


def mlflow_prefix(tenant: str) -> str:
    return f"{tenant_prefix(tenant)}/mlflow"


def step_logs_prefix(tenant: str | None) -> str:
    return STEP_LOGS if tenant is None else f"{tenant_prefix(tenant)}/{STEP_LOGS}"


def pack_prefix(tenant: str, fingerprint: str) -> str:
    return f"{tenant_prefix(tenant)}/packs/{checked_id(fingerprint)}"


def reference_prefix(tenant: str, key: str) -> str:
    return f"{tenant_prefix(tenant)}/references/{checked_id(key)}"


def job_prefix(tenant: str, job_id: str) -> str:
    return f"{tenant_prefix(tenant)}/jobs/{checked_id(job_id)}"


def checkpoint_prefix(tenant: str, job_id: str, attempt: int, step: int) -> str:
    return f"{job_prefix(tenant, job_id)}/checkpoints/a{attempt}/step-{step:08d}"


def base_model_prefix(digest: str) -> str:
    return f"base_models/{checked_id(digest)}"


def attempt_prefix(tenant: str, job_id: str, attempt: int) -> str:
    return f"{job_prefix(tenant, job_id)}/attempts/a{attempt}"


def eval_prefix(tenant: str, job_id: str) -> str:
    return f"{job_prefix(tenant, job_id)}/evals"


def adapter_prefix(tenant: str, adapter_id: str) -> str:
    return f"{tenant_prefix(tenant)}/adapters/{checked_id(adapter_id)}"


def evaluation_key(tenant: str, adapter_id: str, evaluation_id: str) -> str:
    """Key of an evaluation report of the registered adapter; its job's own is under :func:`eval_prefix`."""
    return f"{adapter_prefix(tenant, adapter_id)}/evaluations/{checked_id(evaluation_id)}/report.json"


def is_attempts_export(key: str, *, tenant: str, export_id: str, attempt: int) -> bool:
    """Return whether `key` is that of the archive which an attempt of an export may write, whatever the adapter."""
    adapter_id = key.removeprefix(f"{tenant_prefix(tenant)}/exports/").partition("/")[0]
    return bool(ID.fullmatch(adapter_id)) and key == export_key(tenant, adapter_id, f"{export_id}-a{attempt}")


def export_key(tenant: str, adapter_id: str, key: str) -> str:
    return f"{tenant_prefix(tenant)}/exports/{checked_id(adapter_id)}/{checked_id(key)}.tar"
