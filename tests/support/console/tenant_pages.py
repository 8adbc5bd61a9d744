"""Every page of a tenant, by name, and a hostile text for whatever tenants name."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.platform.console_world import World

HOSTILE = """<script>alert(1)</script>"><img src=x onerror=alert(1)>'{{7*7}}"""
"""In every text that a tenant gives: names, rows, metadata, messages."""


PAGES: dict[str, Callable[[World], str]] = {
    "start": lambda w: "/console",
    "datasets": lambda w: "/console/datasets",
    "upload": lambda w: "/console/datasets/new",
    "dataset": lambda w: f"/console/datasets/{w.dataset}",
    "dataset as trained": lambda w: f"/console/datasets/{w.dataset}?model=tiny-base",
    "contamination lists": lambda w: "/console/datasets/suites",
    "refused file": lambda w: f"/console/files/{w.refused_file}",
    "file being validated": lambda w: f"/console/files/{w.validating_file}",
    "jobs": lambda w: "/console/jobs",
    "failed jobs": lambda w: "/console/jobs?status=failed",
    "new job": lambda w: "/console/jobs/new",
    "running job": lambda w: f"/console/jobs/{w.running}",
    "waiting job": lambda w: f"/console/jobs/{w.waiting}",
    "failed job": lambda w: f"/console/jobs/{w.failed}",
    "compared jobs": lambda w: f"/console/jobs/{w.running}?compare={w.evaluated}&compare={w.failed}",
    "evaluation": lambda w: f"/console/jobs/{w.evaluated}/evaluation",
    "answers that got worse": lambda w: f"/console/jobs/{w.evaluated}/evaluation?only=worse&suite=holdout",
    "models": lambda w: "/console/models",
    "model": lambda w: f"/console/models/{w.draft}",
    "model in production": lambda w: f"/console/models/{w.production}",
    "model to approve": lambda w: f"/console/models/{w.pending}",
    "routes": lambda w: "/console/models/routes",
    "route": lambda w: f"/console/models/routes/{w.route}",
    "base model": lambda w: "/console/models/base/tiny-base",
    "playground": lambda w: "/console/playground",
    "queue": lambda w: "/console/queue",
    "guides": lambda w: "/console/guides",
    "guide": lambda w: "/console/guides/datasets",
    "usage": lambda w: "/console/usage",
    "invoices": lambda w: "/console/usage/invoices",
    "invoice": lambda w: f"/console/usage/invoices/{w.month}",
    "budgets": lambda w: "/console/usage/budgets",
    "settings": lambda w: "/console/settings",
    "all data": lambda w: "/console/settings/data",
    "keys": lambda w: "/console/keys",
    "rotation of a key": lambda w: f"/console/keys/{w.key_id}/rotate",
    "members": lambda w: "/console/members",
    "webhooks": lambda w: "/console/webhooks",
    "audit log": lambda w: "/console/audit",
}
