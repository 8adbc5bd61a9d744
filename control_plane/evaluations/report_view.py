"""An evaluation as tenants see it: report, verdict and advice, the curves, and every item page by page.

A job's own evaluation is found by the job, one of a registered adapter by its row: both have the same files under different keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sqlalchemy.engine import RowMapping

from control_plane.evaluations.service import Evaluated, samples_key
from control_plane.jobs import service as jobs
from control_plane.jobs.results import metric_lines
from control_plane.platform.context import Platform
from ft_assets import layout
from ft_assets.errors import InvalidRequest, NotFound
from ft_assets.evals.gate.advice import Advice, combined
from ft_assets.evals.gate.verdict import Verdict
from ft_assets.evals.scoring.report import EvalReport

MAX_PAGE = 200
Only = Literal["changed", "worse", "better"]
"""``changed``: any answer that differs from the base's, whatever its score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assessment:
    job_id: str
    report: EvalReport
    verdict: Verdict
    advice: tuple[Advice, ...]
    key: str
    """Object key of the stored report."""

    @property
    def next_run(self) -> dict[str, Any]:
        """Hyperparameters that combine the advice."""
        return combined(self.advice)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePage:
    items: Sequence[Mapping[str, Any]]
    has_more: bool


def get(platform: Platform, tenant: str, job_id: str) -> Assessment:
    """Return the job's own evaluation, or that of the earlier job whose adapter was reused."""
    return _read(platform, job_id, _key(platform, tenant, job_id))


def of_evaluation(platform: Platform, evaluation: RowMapping) -> Assessment:
    """Return the stored result of a finished evaluation of an adapter."""
    return _read(platform, evaluation["job_id"], _report_key(platform, evaluation))


def _read(platform: Platform, job_id: str, key: str) -> Assessment:
    found = Evaluated.from_bytes(platform.objects.get_bytes(key), key=key)
    return Assessment(job_id=job_id, report=found.report, verdict=found.verdict, advice=found.advice, key=key)


def curve(platform: Platform, tenant: str, job_id: str) -> list[dict[str, Any]]:
    """Training and validation losses by step."""
    return metric_lines(platform, jobs.measured_by(platform, tenant, job_id))


def samples(
    platform: Platform, tenant: str, job_id: str, *, suite: str | None = None, only: str | None = None, after: str | None = None,
    limit: int = 50,
) -> SamplePage:  # fmt: skip
    """Return items of the evaluation in stored order, after the item `after`."""
    query = _SampleQuery(suite=suite, only=only, after=after, limit=limit)
    return _page(platform, _key(platform, tenant, job_id), query)


def samples_of_evaluation(
    platform: Platform, evaluation: RowMapping, *, suite: str | None = None, only: str | None = None, after: str | None = None,
    limit: int = 50,
) -> SamplePage:  # fmt: skip
    """The same as :func:`samples`, for an evaluation of an adapter."""
    query = _SampleQuery(suite=suite, only=only, after=after, limit=limit)
    return _page(platform, _report_key(platform, evaluation), query)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SampleQuery:
    """Which rows of an evaluation to return, validated."""

    suite: str | None
    only: str | None
    after: str | None
    limit: int

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= MAX_PAGE:
            raise InvalidRequest(f"limit {self.limit} is outside 1..{MAX_PAGE}", code="invalid_limit", param="limit")
        if self.only is not None and self.only not in get_args(Only):
            raise InvalidRequest(f"only {self.only[:40]!r} is not one of {', '.join(get_args(Only))}", param="only")


def _page(platform: Platform, key: str, query: _SampleQuery) -> SamplePage:
    found: list[Mapping[str, Any]] = []
    behind = query.after is None
    for row in _rows(platform, key):
        if not behind:
            behind = row["id"] == query.after
        elif _wanted(row, query.suite, query.only):
            found.append(row)
        if len(found) > query.limit:
            break
    if not behind:
        raise InvalidRequest(
            f"after {query.after!r} names nothing in this list; pass the id of its last item", code="invalid_after", param="after"
        )
    return SamplePage(items=found[: query.limit], has_more=len(found) > query.limit)


def telling(platform: Platform, found: Assessment, *, limit: int) -> list[Mapping[str, Any]]:
    """Return at most `limit` items for a page: those that got worse or better, then those that only changed, then any."""
    order = {"worse": 0, "better": 0, "changed": 1}
    by_rank: dict[int, list[Mapping[str, Any]]] = {0: [], 1: [], 2: []}
    for row in _rows(platform, found.key):
        kept = by_rank[order.get(row["change"], 2)]
        if len(kept) < limit:
            kept.append(row)
    return [row for rank in sorted(by_rank) for row in by_rank[rank]][:limit]


def _wanted(row: Mapping[str, Any], suite: str | None, only: str | None) -> bool:
    if suite is not None and row["suite"] != suite:
        return False
    return only is None or (row["change"] != "same" if only == "changed" else row["change"] == only)


def _rows(platform: Platform, key: str) -> Iterator[Mapping[str, Any]]:
    """Return rows with ids that are unique over suites; for an evaluation without such a file, the samples in its report."""
    if not platform.objects.exists(samples_key(key)):
        shown = json.loads(platform.objects.get_bytes(key))["report"].get("samples", ())
        yield from (_named({"suite": "holdout", "change": "same", **row}) for row in shown)
        return
    with platform.objects.open(samples_key(key)) as lines:
        for line in lines:
            if line.strip():
                yield _named(json.loads(line))


def _named(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "id": f"{row['suite']}/{row['id']}", "item_id": row["id"]}


def _key(platform: Platform, tenant: str, job_id: str) -> str:
    key = f"{layout.eval_prefix(tenant, jobs.measured_by(platform, tenant, job_id))}/report.json"
    if not platform.objects.exists(key):
        state = jobs.get(platform, tenant, job_id).job.state
        raise NotFound(
            f"job {job_id} is {state} and has no evaluation; one follows every training that succeeds", code="evaluation_not_found"
        )
    return key


def _report_key(platform: Platform, evaluation: RowMapping) -> str:
    key = evaluation["report_key"]
    if key is None or not platform.objects.exists(key):
        why = "its report was deleted" if key else f"it is {evaluation['state']}; a report follows its verdict"
        raise NotFound(f"evaluation {evaluation['id']} has no report: {why}", code="evaluation_not_found", param="evaluation_id")
    return str(key)
