"""The documentation's site: no dead link, no page outside the navigation, nothing from elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import ROOT
from tools.docs_site import OF_ROOT

OUTSIDE = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
PLAIN = re.compile(r"<p>(?:(?!</p>).)*?\n\s*(?:[-*] |\d+\. |\|).*?</p>", re.DOTALL)
"""A list or table that was taken for text: in Markdown of the site its nested lines are indented by 4 spaces."""


def build(site: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.html")}
    written = [*(ROOT / "docs").rglob("*.md"), *OF_ROOT]
    assert len(pages) == len(written) + 1, "and the page for an address that does not exist"
    assert [(name, found[0]) for name, text in pages.items() if (found := OUTSIDE.search(text))] == []
    assert [(name, found[0][:200]) for name, text in pages.items() if (found := PLAIN.search(text))] == []
    styles = [path.read_text() for path in tmp_path.rglob("*.css")]
    assert len(styles) > 2 and not [found for style in styles if (found := re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style))]
    assert (tmp_path / "site.css").read_text() == (ROOT / "docs" / "site.css").read_text()
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 100_000


@pytest.mark.slow
def test_a_dead_link_a_missing_heading_and_a_page_outside_the_navigation_fail_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("pictures", "console.md"))
    (tmp_path / "docs" / "status.md").write_text("# Status\n\n[a](nowhere.md) [b](api.md#nothing)\n")
    (tmp_path / "docs" / "alone.md").write_text("# Alone\n")
    config = (ROOT / "mkdocs.yml").read_text().replace("docs_dir: docs", f"docs_dir: {tmp_path / 'docs'}").replace("- console.md", "")
    (tmp_path / "mkdocs.yml").write_text(config.replace("tools/docs_site.py", str(ROOT / "tools" / "docs_site.py")))
    done = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert done.returncode != 0
    assert all(named in done.stderr for named in ("nowhere.md", "#nothing", "alone.md")), done.stderr


def test_warnings_of_the_build_are_about_what_its_makers_say() -> None:
    """What is not said here passes in silence, so that --strict would not see it."""
    text = (ROOT / "mkdocs.yml").read_text()
    checked = yaml.safe_load(text[text.index("validation:") : text.index("markdown_extensions:")])["validation"]
    assert {level for group in checked.values() for level in group.values()} == {"warn"}
