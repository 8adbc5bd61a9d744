"""How operations of the API are called otherwise: with OpenAI's client, and with ``ft``; and bodies that show more than required fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAiCall:
    method: str
    """Below the client, such as ``fine_tuning.jobs.create``."""
    own: tuple[str, ...] = ()
    """Fields that OpenAI's client does not know: sent as ``extra_body`` or ``extra_query``."""


def _call(method: str, *own: str) -> OpenAiCall:
    return OpenAiCall(method=method, own=own)


UPLOAD = ("column_map", "policies", "encoding", "rows_at", "model")
JOB = (
    "training_files",
    "eval_config",
    "tier",
    "spot",
    "recipe",
    "hardware",
    "adapter",
    "auto_promote",
    "warm_start",
    "force",
    "idempotency_key",
)
OPENAI: Mapping[str, OpenAiCall] = {
    "POST /v1/files": _call("files.create", *UPLOAD, "expires_after[anchor]", "expires_after[seconds]"),
    "GET /v1/files": _call("files.list", "sha256"),
    "GET /v1/files/{file_id}": _call("files.retrieve"),
    "DELETE /v1/files/{file_id}": _call("files.delete"),
    "GET /v1/files/{file_id}/content": _call("files.content"),
    "POST /v1/uploads": _call("uploads.create", *UPLOAD),
    "POST /v1/uploads/{upload_id}/parts": _call("uploads.parts.create"),
    "POST /v1/uploads/{upload_id}/complete": _call("uploads.complete"),
    "POST /v1/uploads/{upload_id}/cancel": _call("uploads.cancel"),
    "POST /v1/fine_tuning/jobs": _call("fine_tuning.jobs.create", *JOB),
    "GET /v1/fine_tuning/jobs": _call("fine_tuning.jobs.list", "status", "state", "model", "method", "created_after", "created_before"),
    "GET /v1/fine_tuning/jobs/{job_id}": _call("fine_tuning.jobs.retrieve"),
    "POST /v1/fine_tuning/jobs/{job_id}/cancel": _call("fine_tuning.jobs.cancel"),
    "POST /v1/fine_tuning/jobs/{job_id}/pause": _call("fine_tuning.jobs.pause"),
    "POST /v1/fine_tuning/jobs/{job_id}/resume": _call("fine_tuning.jobs.resume"),
    "GET /v1/fine_tuning/jobs/{job_id}/events": _call("fine_tuning.jobs.list_events", "stream"),
    "GET /v1/fine_tuning/jobs/{job_id}/checkpoints": _call("fine_tuning.jobs.checkpoints.list"),
    "POST /v1/fine_tuning/checkpoints/{fine_tuned_model_checkpoint}/permissions": _call("fine_tuning.checkpoints.permissions.create"),
    "GET /v1/fine_tuning/checkpoints/{fine_tuned_model_checkpoint}/permissions": _call("fine_tuning.checkpoints.permissions.list"),
    "DELETE /v1/fine_tuning/checkpoints/{fine_tuned_model_checkpoint}/permissions/{permission_id}":
        _call("fine_tuning.checkpoints.permissions.delete"),
    "POST /v1/fine_tuning/alpha/graders/run": _call("fine_tuning.alpha.graders.run"),
    "POST /v1/fine_tuning/alpha/graders/validate": _call("fine_tuning.alpha.graders.validate"),
    "GET /v1/models": _call("models.list", "type", "base_model"),
    "GET /v1/models/{model}": _call("models.retrieve"),
    "DELETE /v1/models/{model}": _call("models.delete"),
    "POST /v1/webhook_endpoints": _call("webhooks.create"),
    "GET /v1/webhook_endpoints": _call("webhooks.list"),
    "GET /v1/webhook_endpoints/{webhook_endpoint_id}": _call("webhooks.retrieve"),
    "POST /v1/webhook_endpoints/{webhook_endpoint_id}": _call("webhooks.update", "state"),
    "DELETE /v1/webhook_endpoints/{webhook_endpoint_id}": _call("webhooks.delete"),
    "POST /v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret": _call("webhooks.rotate_secret"),
    "POST /v1/webhook_endpoints/{webhook_endpoint_id}/test": _call("webhooks.test"),
    "GET /v1/webhook_event_types": _call("webhooks.event_types.list"),
    "POST /v1/chat/completions": _call("chat.completions.create"),
    "POST /v1/responses": _call("responses.create"),
    "POST /v1/completions": _call("completions.create"),
}  # fmt: skip
"""By method and path. ``docs/api.md`` has the same table, with what the client calls besides."""

FT: Mapping[str, str] = {
    "POST /v1/files": "ft upload FILE", "GET /v1/files": "ft files list", "GET /v1/files/{file_id}": "ft files show {file_id}",
    "DELETE /v1/files/{file_id}": "ft files delete {file_id}",
    "GET /v1/files/{file_id}/content": "ft files download {file_id} --out FILE",
    "POST /v1/files/{file_id}/validate": "ft files validate {file_id}", "GET /v1/datasets": "ft datasets list",
    "GET /v1/datasets/{dataset_id}": "ft datasets show {dataset_id}",
    "POST /v1/datasets/{dataset_id}/approve": "ft datasets approve {dataset_id}",
    "GET /v1/datasets/{dataset_id}/preview": "ft preview {dataset_id}", "GET /v1/suites": "ft contamination list",
    "POST /v1/suites": "ft contamination add NAME FILE", "DELETE /v1/suites/{name}": "ft contamination remove {name}",
    "POST /v1/scored_suites": "ft scored-suites add NAME FILE --metric exact_match", "GET /v1/scored_suites": "ft scored-suites list",
    "GET /v1/scored_suites/{name}": "ft scored-suites versions {name}", "DELETE /v1/scored_suites/{name}": "ft scored-suites remove {name}",
    "GET /v1/capability_suites": "ft suites capability", "POST /v1/fine_tuning/jobs": "ft submit FILE_OR_ID --model MODEL",
    "GET /v1/fine_tuning/jobs": "ft jobs", "POST /v1/fine_tuning/estimate": "ft estimate FILE_OR_ID --model MODEL",
    "POST /v1/fine_tuning/jobs/estimate": "ft estimate FILE_OR_ID --model MODEL",
    "GET /v1/fine_tuning/jobs/compare": "ft compare JOB JOB", "GET /v1/fine_tuning/jobs/{job_id}": "ft job {job_id}",
    "POST /v1/fine_tuning/jobs/{job_id}/cancel": "ft cancel {job_id}", "POST /v1/fine_tuning/jobs/{job_id}/pause": "ft pause {job_id}",
    "POST /v1/fine_tuning/jobs/{job_id}/resume": "ft resume {job_id}", "GET /v1/fine_tuning/jobs/{job_id}/events": "ft logs {job_id}",
    "GET /v1/fine_tuning/jobs/{job_id}/logs": "ft logs {job_id} --training",
    "GET /v1/fine_tuning/jobs/{job_id}/metrics.csv": "ft metrics {job_id}",
    "GET /v1/fine_tuning/jobs/{job_id}/tensorboard": "ft metrics {job_id} --tensorboard DIR",
    "GET /v1/fine_tuning/jobs/{job_id}/checkpoints": "ft checkpoints {job_id}",
    "GET /v1/fine_tuning/jobs/{job_id}/cost": "ft cost {job_id}", "GET /v1/fine_tuning/jobs/{job_id}/evaluation": "ft eval {job_id}",
    "GET /v1/fine_tuning/jobs/{job_id}/evaluation/samples": "ft eval {job_id} --samples",
    "POST /v1/fine_tuning/sweeps": "ft sweep create FILE_OR_ID --model MODEL --param NAME=A,B",
    "GET /v1/fine_tuning/sweeps": "ft sweep list", "GET /v1/fine_tuning/sweeps/{sweep_id}": "ft sweep show {sweep_id}",
    "POST /v1/fine_tuning/sweeps/{sweep_id}/cancel": "ft sweep cancel {sweep_id}", "GET /v1/recipes": "ft recipes list",
    "GET /v1/recipes/{name}": "ft recipes show {name}", "GET /v1/queue": "ft queue", "GET /v1/models": "ft models",
    "GET /v1/adapters": "ft adapters list", "POST /v1/adapters/{adapter_id}/promote": "ft promote {adapter_id}",
    "POST /v1/adapters/{adapter_id}/rollback": "ft rollback {adapter_id}",
    "POST /v1/adapters/{adapter_id}/approve": "ft adapters approve {adapter_id}",
    "POST /v1/adapters/{adapter_id}/reject": "ft adapters reject {adapter_id}",
    "GET /v1/adapters/{adapter_id}/lineage": "ft adapters lineage {adapter_id}",
    "GET /v1/models/{model}/lineage": "ft adapters lineage {model}",
    "POST /v1/adapters/{adapter_id}/evaluations": "ft adapters evaluate {adapter_id}",
    "GET /v1/adapters/{adapter_id}/evaluations": "ft adapters evaluations {adapter_id}",
    "POST /v1/adapters/{adapter_id}/exports": "ft export {adapter_id} --format adapter --out FILE",
    "GET /v1/adapters/{adapter_id}/server": "ft manifest server {adapter_id}",
    "GET /v1/model_routes/{name}/rewrite": "ft manifest route {name}", "GET /v1/model_routes": "ft routes list",
    "GET /v1/model_routes/{name}": "ft routes show {name}", "PUT /v1/model_routes/{name}": "ft routes set {name} MODEL=WEIGHT",
    "DELETE /v1/model_routes/{name}": "ft routes delete {name}", "POST /v1/chat/completions": "ft chat MODEL PROMPT",
    "GET /v1/me": "ft whoami", "GET /v1/quota": "ft quota", "GET /v1/usage": "ft usage", "GET /v1/usage.csv": "ft usage --csv",
    "GET /v1/invoices": "ft invoices", "GET /v1/invoices/{month}": "ft invoice {month}",
    "GET /v1/invoices/{month}.csv": "ft invoice {month} --csv", "GET /v1/budgets": "ft budgets list",
    "POST /v1/budgets": "ft budgets create NAME --usd AMOUNT",
    "POST /v1/budgets/{budget_id}": "ft budgets update {budget_id} --usd AMOUNT",
    "DELETE /v1/budgets/{budget_id}": "ft budgets delete {budget_id}", "GET /v1/api_keys": "ft keys list",
    "POST /v1/api_keys": "ft keys create NAME", "GET /v1/api_keys/{key_id}": "ft keys show {key_id}",
    "POST /v1/api_keys/{key_id}/rotate": "ft keys rotate {key_id}", "DELETE /v1/api_keys/{key_id}": "ft keys revoke {key_id}",
    "GET /v1/members": "ft members list", "POST /v1/members": "ft members add EMAIL",
    "POST /v1/members/{member_id}": "ft members update {member_id}", "DELETE /v1/members/{member_id}": "ft members remove {member_id}",
    "GET /v1/audit_log": "ft audit", "GET /v1/data_export": "ft export-data --out FILE", "GET /v1/deletions": "ft deletions",
    "GET /v1/deletions/{deletion_id}": "ft deletions {deletion_id}", "GET /v1/webhook_endpoints": "ft webhooks list",
    "POST /v1/webhook_endpoints": "ft webhooks create NAME URL",
    "GET /v1/webhook_endpoints/{webhook_endpoint_id}": "ft webhooks show {webhook_endpoint_id}",
    "DELETE /v1/webhook_endpoints/{webhook_endpoint_id}": "ft webhooks delete {webhook_endpoint_id}",
    "POST /v1/webhook_endpoints/{webhook_endpoint_id}/test": "ft webhooks test {webhook_endpoint_id}",
    "POST /v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret": "ft webhooks rotate-secret {webhook_endpoint_id}",
    "GET /v1/webhook_endpoints/{webhook_endpoint_id}/deliveries": "ft webhooks deliveries {webhook_endpoint_id}",
    "POST /v1/webhook_endpoints/{webhook_endpoint_id}/deliveries/{delivery_id}/replay":
        "ft webhooks replay {webhook_endpoint_id} {delivery_id}",
    "GET /v1/webhook_event_types": "ft webhooks types", "PUT /v1/integrations/wandb": "ft wandb set",
    "GET /v1/integrations/wandb": "ft wandb show", "DELETE /v1/integrations/wandb": "ft wandb remove",
}  # fmt: skip
"""By method and path: the command with the path's parameters; words in capitals are for the reader to fill in."""

CHAT = {"model": "MODEL", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
NEW_JOB = {"model": "MODEL", "training_file": "file-...", "suffix": "support", "hyperparameters": {"n_epochs": 3}}
BODIES: Mapping[str, Mapping[str, Any]] = {
    "POST /v1/chat/completions": CHAT,
    "POST /v1/responses": {"model": "MODEL", "input": "Hello", "max_output_tokens": 64},
    "POST /v1/completions": {"model": "MODEL", "prompt": "Hello", "max_tokens": 64},
    "POST /v1/fine_tuning/jobs": NEW_JOB,
    "POST /v1/fine_tuning/estimate": NEW_JOB,
    "POST /v1/fine_tuning/jobs/estimate": NEW_JOB,
    "POST /v1/adapters/{adapter_id}/exports": {"format": "adapter"},
    "PUT /v1/model_routes/{name}": {"targets": [{"model": "MODEL", "weight": 1}]},
    "POST /v1/budgets": {"name": "Support", "limit_micros": 100_000_000, "thresholds": [50, 80, 100]},
}
"""Examples of bodies where required fields alone say too little."""
