"""Stored results of evaluations: report, verdict and advice, the messages about them, and every item page by page.

A job's own evaluation is found by the job, one of a registered adapter by its row: both have the same files under different keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, get_args

from control_plane.attempts import health
from control_plane.evaluations.tables import Evaluation
from control_plane.jobs import service as jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_events import Event
from control_plane.platform.pagination import Page
from control_plane.platform.protocols import Tables
from core import layout
from core.errors import InvalidRequest, NotFound
from engine.evals import RESULT_NAME, SAMPLES_NAME, Advice, EvalConfig, EvalReport, Finding, Verdict, combined_changes, score_table

MAX_PAGE = 200
SCORES, GATE_RULES = "evaluation/scores.json", "evaluation/gate.json"
"""Names of an evaluation's tables."""
SCORE_COLUMNS = ("suite", "metric", "n", "base", "adapter", "previous", "gain", "ci_low", "ci_high", "p_value")
FINDING_COLUMNS = ("rule", "code", "passed", "blocking", "detail", "next_step")
Only = Literal["changed", "worse", "better"]
"""``changed``: any answer that differs from the base's, whatever its score."""
CHANGES = ("worse", "better", "changed", "same")
"""Each ``change`` of an item, the most telling first."""
Sample = Mapping[str, Any]
"""A line of the samples: ``id`` (unique over suites), ``suite``, ``item_id``, the answers by subject, ``change``, ``scores``, ``judge``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    report: EvalReport
    verdict: Verdict
    advice: tuple[Advice, ...]
    """Changes for the next run, derived from the curves and the report."""
    key: str
    """Object key of the stored report."""

    def to_dict(self) -> Mapping[str, Any]:
        return {"report": asdict(self.report), "verdict": self.verdict.to_dict(), "advice": [asdict(a) for a in self.advice]}

    @classmethod
    def from_bytes(cls, stored: bytes, *, key: str) -> Self:
        """A stored report with its verdict, of this version or an earlier one."""
        body = json.loads(stored)
        return cls(
            report=EvalReport.from_dict(body["report"]),
            verdict=Verdict.from_dict(body["verdict"]),
            advice=tuple(Advice.from_dict(a) for a in body.get("advice", ())),
            key=key,
        )

    @property
    def next_run(self) -> Mapping[str, float]:
        """Hyperparameters that combine the advice."""
        return combined_changes(self.advice)

    @property
    def samples_key(self) -> str:
        return samples_key(self.key)

    @property
    def files(self) -> dict[str, bytes]:
        """Return report and verdict for people, without any row of the tenant's data."""
        bare = replace(self, report=replace(self.report, samples=()))
        page = f"{score_table(bare.report)}\n\n{self.verdict_markdown}\n"
        return {"evaluation/report.json": health.as_json(bare.to_dict()), "evaluation/report.md": page.encode()}

    @property
    def tables(self) -> Tables:
        """Return the scores and the gate's findings as tables, by which a tracker compares runs; without any row of the tenant's data."""
        scores = [{name: getattr(score, name) for name in SCORE_COLUMNS} for score in self.report.scores]
        findings = [{name: getattr(finding, name) for name in FINDING_COLUMNS} for finding in self.verdict.findings]
        return {path: rows for path, rows in ((SCORES, scores), (GATE_RULES, findings)) if rows}

    @property
    def verdict_markdown(self) -> str:
        findings = [f"- {'ok' if f.passed else 'FAILED'} **{f.rule}** ({f.code}): {f.detail}" for f in self.verdict.findings]
        return "\n".join([f"**{self.verdict.outcome}**, resting on {self.verdict.rests_on}", "", *findings])

    @property
    def seconds_by_suite(self) -> dict[str, float]:
        """Seconds over all subjects; cached answers count as zero."""
        return {s.id: round(sum(v for k, v in s.seconds.items() if k not in s.cached), 3) for s in self.report.suites}

    @property
    def advised(self) -> str:
        return " ".join(a.message for a in self.advice) or "Look at the eval report's samples."

    def failed(self, rules: EvalConfig) -> list[Finding]:
        """Failed rules that block, or would block if the job did more than monitor."""
        skipped = {*rules.skip} if rules.block_regression else {*rules.skip, "regression"}
        return [f for f in self.verdict.findings if not f.passed and (f.blocking or f.rule not in skipped)]

    def alert(self, rules: EvalConfig, *, code: str, about: str, data: Mapping[str, Any]) -> Event | None:
        """Return the message to the tenant about an adapter that stays in service, or waits; None if nothing failed."""
        if not (found := self.failed(rules)):
            return None
        why = "; ".join(f"{f.code}: {f.detail}" for f in found)
        reasons = {"reasons": [f.code for f in found], "report": self.key}
        return Event(code=code, level="warn", message=f"{about} {why}. {self.advised}", data=reasons | dict(data))


def report_key(tenant: str, job_id: str) -> str:
    """Return the key of the report of the job's own evaluation."""
    return f"{layout.eval_prefix(tenant, job_id)}/report.json"


def samples_key(report: str) -> str:
    """Return the key of every item with every subject's answer, one JSON per line, beside the report of this key."""
    return f"{report.rpartition('/')[0]}/{SAMPLES_NAME}"


def result_key(report: str) -> str:
    """Return the key of the evaluation's result file, beside the report of this key."""
    return f"{report.rpartition('/')[0]}/{RESULT_NAME}"


def verdicts_prefix(report: str) -> str:
    """Return the prefix of the verdicts of judge and classifier that were kept while the evaluation was reviewed."""
    return f"{report.rpartition('/')[0]}/verdicts"


def load(platform: Platform, key: str) -> Evaluated:
    return Evaluated.from_bytes(platform.objects.get_bytes(key), key=key)


def load_evaluated(platform: Platform, tenant: str, job_id: str) -> Evaluated:
    """Return the stored report and verdict of the job's last evaluation."""
    return load(platform, report_key(tenant, job_id))


def key_of_job(platform: Platform, tenant: str, job_id: str) -> str:
    """Return the key of the report of the job, or of the earlier job whose adapter was reused."""
    key = report_key(tenant, jobs.measured_by(platform, tenant, job_id))
    if not platform.objects.exists(key):
        state = jobs.get(platform, tenant, job_id).job.state
        raise NotFound(
            f"job {job_id} is {state} and has no evaluation; one follows every training that succeeds", code="evaluation_not_found"
        )
    return key


def key_of_evaluation(platform: Platform, evaluation: Evaluation) -> str:
    """Return the key of the report of a finished evaluation of an adapter."""
    key = evaluation.report_key
    if key is None or not platform.objects.exists(key):
        why = "its report was deleted" if key else f"it is {evaluation.state}; a report follows its verdict"
        raise NotFound(f"evaluation {evaluation.id} has no report: {why}", code="evaluation_not_found", param="evaluation_id")
    return key


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleQuery:
    """Which items of an evaluation to return, validated."""

    suite: str | None = None
    only: str | None = None
    """One of :data:`Only`; None: any."""
    after: str | None = None
    limit: int = 50

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= MAX_PAGE:
            raise InvalidRequest(f"limit {self.limit} is outside 1..{MAX_PAGE}", code="invalid_limit", param="limit")
        if self.only is not None and self.only not in get_args(Only):
            raise InvalidRequest(f"only {self.only[:40]!r} is not one of {', '.join(get_args(Only))}", param="only")

    def wants(self, row: Sample) -> bool:
        changed = self.only is None or (row["change"] != "same" if self.only == "changed" else row["change"] == self.only)
        return changed and self.suite in (None, row["suite"])


def samples(platform: Platform, key: str, query: SampleQuery) -> Page[Sample]:
    """Return items of the evaluation whose report has this key, in stored order, after the item `after`."""
    found: list[Sample] = []
    behind = query.after is None
    for row in _rows(platform, key):
        if not behind:
            behind = row["id"] == query.after
        elif query.wants(row):
            found.append(row)
        if len(found) > query.limit:
            break
    if not behind:
        raise InvalidRequest(
            f"after {query.after!r} does not match any item in this list; pass the id of its last item", code="invalid_after", param="after"
        )
    return Page(items=found[: query.limit], has_more=len(found) > query.limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedSamples:
    """Items of an evaluation, disagreements with the base first."""

    items: Sequence[Sample]
    counts: Mapping[str, int]
    """Items of the suite by ``change``."""
    suites: Sequence[str]


def ranked(platform: Platform, key: str, *, only: str | None = None, suite: str | None = None, skip: int = 0, limit: int) -> RankedSamples:
    """Return at most `limit` items after the first `skip`: those that got worse, those that got better, those that changed, the rest.

    `only`: items of one ``change``; `suite`: of one suite.
    """
    by_change: dict[str, list[Sample]] = {change: [] for change in CHANGES}
    suites: dict[str, None] = {}
    for row in _rows(platform, key):
        suites[row["suite"]] = None
        if suite in (None, row["suite"]):
            by_change[row["change"]].append(row)
    chosen = [row for change, rows in by_change.items() if only in (None, change) for row in rows]
    counts = {change: len(rows) for change, rows in by_change.items()}
    return RankedSamples(items=chosen[skip : skip + limit], counts=counts, suites=list(suites))


def _rows(platform: Platform, key: str) -> Iterator[Sample]:
    """Return rows with ids that are unique over suites; for an evaluation without such a file, the samples in its report."""
    if not platform.objects.exists(samples_key(key)):
        shown = json.loads(platform.objects.get_bytes(key))["report"].get("samples", ())
        yield from (_named({"suite": "holdout", "change": "same", **row}) for row in shown)
        return
    with platform.objects.open(samples_key(key)) as lines:
        for line in lines:
            if line.strip():
                yield _named(json.loads(line))


def _named(row: Sample) -> Sample:
    return {**row, "id": f"{row['suite']}/{row['id']}", "item_id": row["id"]}
