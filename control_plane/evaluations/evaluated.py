"""A stored evaluation: report, verdict and advice, and the object keys of its files."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Self

from control_plane.attempts import health
from control_plane.platform.context import Platform
from ft_assets import layout
from ft_assets.evals.gate.advice import Advice
from ft_assets.evals.gate.gates import Verdict
from ft_assets.evals.run import run_file
from ft_assets.evals.scoring import report
from ft_assets.evals.scoring.report import EvalReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    report: EvalReport
    verdict: Verdict
    advice: tuple[Advice, ...]
    """Changes for the next run, derived from the curves and the report."""
    key: str
    """Object key of the stored report."""

    def to_dict(self) -> dict[str, Any]:
        return {"report": self.report.to_dict(), "verdict": self.verdict.to_dict(), "advice": [a.to_dict() for a in self.advice]}

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
    def samples_key(self) -> str:
        return samples_key(self.key)

    @property
    def files(self) -> dict[str, bytes]:
        """Return report and verdict for people, without any row of the tenant's data."""
        bare = replace(self, report=replace(self.report, samples=()))
        page = f"{report.markdown_table(bare.report)}\n\n{self.verdict_markdown}\n"
        return {"evaluation/report.json": health.as_json(bare.to_dict()), "evaluation/report.md": page.encode()}

    @property
    def verdict_markdown(self) -> str:
        findings = [f"- {'ok' if f.passed else 'FAILED'} **{f.rule}** ({f.code}): {f.detail}" for f in self.verdict.findings]
        return "\n".join([f"**{self.verdict.outcome}**, resting on {self.verdict.rests_on}", "", *findings])

    @property
    def seconds_by_suite(self) -> dict[str, float]:
        """Seconds over all subjects; cached answers count as zero."""
        return {s.id: round(sum(v for k, v in s.seconds.items() if k not in s.cached), 3) for s in self.report.suites}


def report_key(tenant: str, job_id: str) -> str:
    """Return the key of the report of the job's own evaluation."""
    return f"{layout.eval_prefix(tenant, job_id)}/report.json"


def samples_key(report: str) -> str:
    """Return the key of every item with every subject's answer, one JSON per line, beside the report of this key."""
    return f"{report.rpartition('/')[0]}/{run_file.SAMPLES_NAME}"


def result_key(report: str) -> str:
    """Return the key of the evaluation's result file, beside the report of this key."""
    return f"{report.rpartition('/')[0]}/{run_file.RESULT_NAME}"


def load_evaluated(platform: Platform, tenant: str, job_id: str) -> Evaluated:
    """Return the stored report and verdict of the job's last evaluation."""
    key = report_key(tenant, job_id)
    return Evaluated.from_bytes(platform.objects.get_bytes(key), key=key)
