"""What ``mkdocs.yml`` cannot say: hooks that complete the navigation and the links of the documentation's site.

The pages are written to be read in the repository as well, so their links are those of files.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OF_ROOT = {"CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md", "THIRD-PARTY.md": "third-party.md"}
"""Files of the repository's root that are pages of the site."""
LINK = re.compile(r"\[([^\]]*)\]\((?!https?://|mailto:|#)([^)#\s]+)(#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add alerts and files of the root to the navigation."""
    docs = Path(config.docs_dir)
    sections = {next(iter(section)): next(iter(section.values())) for section in config.nav or ()}
    (alerts,) = (entry["Alerts"] for entry in sections["Operators"] if isinstance(entry, dict))
    alerts += [f"operations/runbook/{path.name}" for path in sorted((docs / "operations" / "runbook").glob("*.md"))]
    sections["Project"] += list(OF_ROOT.values())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the root as pages."""
    for name, page in OF_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - MkDocs passes them by name
    """Lead links to files of the repository to their page; a file that has none is named by its path."""
    names = {page: name for name, page in OF_ROOT.items()}
    place = posixpath.dirname(posixpath.join("docs", page.file.src_uri)) if page.file.src_uri not in names else ""

    def lead(found: re.Match[str]) -> str:
        text, target, anchor = found[1], posixpath.normpath(posixpath.join(place, found[2])), found[3] or ""
        if target in OF_ROOT or target.startswith("docs/"):
            there = OF_ROOT.get(target) or target.removeprefix("docs/")
            return f"[{text}]({posixpath.relpath(there, posixpath.dirname(page.file.src_uri) or '.')}{anchor})"
        return f"`{target}`" if text in (target, posixpath.basename(target), f"`{target}`") else f"{text} (`{target}`)"

    return LINK.sub(lead, markdown)
