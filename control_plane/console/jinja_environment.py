"""The one Jinja environment of the console: templates, and how values are written."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from control_plane.console import static_files
from control_plane.console.report_labels import ADAPTERS, METRICS, SETTINGS
from core.epoch_time import span_words

TEMPLATES = Path(__file__).parent / "templates"
KIB = 1024
CODE = re.compile(r"`([^`]+)`")


def render(name: str, /, **values: Any) -> str:
    """Render a template; everything that it is given is escaped."""
    return _environment().get_template(name).render(values)


def document(name: str, /, *, title: str, **values: Any) -> str:
    """Render a report's body as one self-contained page, with its style inside."""
    style = Markup(static_files.text("console.css"))
    return render("documents/page.html", body=f"documents/{name}.html", kind=name, is_alone=True, title=title, style=style, **values)


@cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    made.globals["static"] = static_files.url
    made.filters |= {
        "adapter": lambda kind: ADAPTERS.get(kind, kind), "at": _at, "bytes": _bytes, "change": _change, "day": _day,
        "hyperparameters": _hyperparameters, "iso": _iso, "metric": lambda name: METRICS.get(name) or name.replace("_", " "),
        "money": _money, "number": _number,
        "parameters": _parameters, "percent": lambda share: f"{100 * share:.1f} %",
        "plus_days": lambda moment, days: moment + (timedelta(days=days) if isinstance(moment, datetime) else days * 86_400),
        "points": lambda share: f"{100 * share:+.1f}", "prose": _prose, "score": _score,
        "quoted": lambda text: json.dumps(text, ensure_ascii=False), "sentence": lambda text: text[:1].upper() + text[1:],
        "setting": _setting, "span": span_words, "stopped": lambda text: text if text.endswith((".", "?", "!")) else f"{text}.",
        "why": _why, "words": lambda text: text.replace("_", " "),
    }  # fmt: skip
    return made


def _at(moment: float | None, form: str | None = None) -> str:
    return "" if moment is None else time.strftime(form or "%a %H:%M", time.localtime(moment))


def _day(moment: datetime | float) -> str:
    """Format the day in UTC, by which months are billed."""
    return (moment if isinstance(moment, datetime) else datetime.fromtimestamp(moment, UTC)).strftime("%Y-%m-%d")


def _iso(moment: datetime | float) -> str:
    """Format a time for ``<time datetime>``; the browser shows it in its own time zone."""
    return (moment if isinstance(moment, datetime) else datetime.fromtimestamp(moment, UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _hyperparameters(changes: Mapping[str, float]) -> str:
    return ", ".join(f"{_setting(name)} {value:g}" for name, value in changes.items())


def _setting(name: str) -> str:
    return SETTINGS.get(name) or name.replace("_", " ")


def _change(value: Any) -> Markup:
    """Format a field's change in the audit log: its old and new value, or the new one alone."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        old, new = (_field(one) for one in value)
        return new if value[0] is None else Markup('<span class="soft">{}</span> → {}').format(old, new)
    return _field(value)


def _field(value: Any) -> Markup:
    if value is None:
        return Markup("&ndash;")
    return escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def _money(micros: int) -> str:
    """Format micro-dollars: cents, or more digits where cents would show nothing."""
    dollars = abs(micros) / 1e6
    digits = 2 if dollars >= 0.01 or not micros else 4
    return f"{'-' if micros < 0 else ''}${dollars:,.{digits}f}"


def _bytes(size: float) -> str:
    size = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < KIB:
            return f"{size:,.0f} {unit}" if unit == "B" or size.is_integer() else f"{size:,.1f} {unit}"
        size /= KIB
    return f"{size:,.1f} TiB"


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"


def _parameters(count: int) -> str:
    """Format a number of parameters as models are named: 3.2M, 8B."""
    size, unit = (count / 1e9, "B") if count >= 1e9 else (count / 1e6, "M")
    return f"{size:.3g}{unit}"


def _prose(text: str) -> Markup:
    """Escape a docstring and show what stands between backticks as code."""
    return Markup(CODE.sub(r"<code>\1</code>", str(escape(text))))


def _score(value: float | None, share: bool) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f} %" if share else f"{value:,.3f}"


def _why(flag: Mapping[str, Any]) -> str:
    """Describe why a row was flagged."""
    if "of_row" in flag:
        return f"repeats row {flag['of_row']}"
    if "suite" in flag:
        return f"{100 * flag['share']:.0f} % of it is in suite {flag['suite']}"
    return f"score {flag['score']:.2f}"
