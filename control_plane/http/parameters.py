"""Parameters shared by several routes.

Bounds are only documented here; the service enforces them, with its own error codes.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header, Path, Query

After = Annotated[str | None, Query(description="Id of the last item of the previous page. Default: the first page.")]


def limit(most: int) -> Any:
    """Returns the query parameter for the page size, 1 to `most`."""
    return Query(description=f"Items per page, 1 to {most:,}.", json_schema_extra={"minimum": 1, "maximum": most})


Limit = Annotated[int, limit(100)]

AdapterId = Annotated[str, Path(description="Id of the adapter (`adp-...`), or its model name (`ft:...`).")]
CheckpointName = Annotated[str, Path(description="Checkpoint, by its id (`ftckpt_...`) or as `<job id>:step-<step>`.")]
BudgetId = Annotated[str, Path(description="Id of the budget, as in `GET /v1/budgets`.")]
CaseId = Annotated[str, Path(description="Id of the refund case, as in the list of refund cases.")]
DatasetId = Annotated[str, Path(description="Id of the dataset version, starting with `ds_`.")]
EvaluationId = Annotated[str, Path(description="Id of the evaluation, starting with `ev-`.")]
ExportId = Annotated[str, Path(description="Id of the export, starting with `exp-`.")]
FileId = Annotated[str, Path(description="Id of the file, starting with `file-`.")]
JobId = Annotated[str, Path(description="Id of the fine-tuning job, starting with `ftjob-`.")]
KeyId = Annotated[str, Path(description="Id of the API key, starting with `key_`; not its secret.")]
MemberId = Annotated[str, Path(description="Id of the member, starting with `mem_`.")]
ModelName = Annotated[
    str, Path(description="Model name as used in requests: a base model, a model route, or an adapter's model name or id.")
]
Month = Annotated[str, Path(description="Calendar month in UTC, as `yyyy-mm`.")]
NodeName = Annotated[str, Path(description="Name of the node.")]
RouteName = Annotated[str, Path(description="Name of the model route.")]
SweepId = Annotated[str, Path(description="Id of the sweep, starting with `ftsweep-`.")]
TenantId = Annotated[str, Path(description="Id of the tenant.")]
UploadId = Annotated[str, Path(description="Id of the upload, starting with `upload_`.")]
WebhookEndpointId = Annotated[str, Path(description="Id of the webhook endpoint, starting with `we_`.")]

Accept = Annotated[str, Header(description="`text/html` returns an HTML page; anything else returns JSON.")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        description="Unique key of this request, 1 to 255 characters, remembered for 30 days. A request with the same key and body "
        "returns what the first one created; the same key with a different body is refused."
    ),
]
RetryHeader = Annotated[str | None, Header(include_in_schema=False)]
"""Of OpenAI's clients: how often they sent this request before, and how long they wait for an answer."""

Change = Annotated[
    str | None,
    Query(description="Return only items whose answer is `worse` or `better` than the base model's, or `changed` (different in any way)."),
]
LedgerJob = Annotated[str | None, Query(description="Return only entries of the job with this id.")]
LedgerKind = Annotated[str | None, Query(description="Return only entries of this kind: `usage`, `refund`, `storage` or `adjustment`.")]
RecipeMethod = Annotated[str, Query(description="Training method whose defaults are shown, such as `sft`, `dpo` or `cpt`.")]
Suite = Annotated[
    str | None,
    Query(description="Return only items of this suite, such as `holdout`, `safety`, `golden`, `suite/<name>` or `capability/<name>`."),
]
TenantFilter = Annotated[str | None, Query(description="Return only what concerns the tenant with this id. Default: all tenants.")]
Verify = Annotated[
    bool, Query(description="Read all stored bytes again and compare them with their recorded hashes, which can take minutes.")
]
