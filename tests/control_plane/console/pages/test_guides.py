"""Guides in the console: each is rendered, and every link in it leads somewhere."""

from __future__ import annotations

import re

from control_plane.console.documents import guides
from tests.control_plane.console.conftest import Visitor

INTERNAL = re.compile(rf'href="(?:{guides.PLACE}/(\w[\w-]*))?(?:#([^"]+))?"')


def test_every_link_of_a_guide_leads_to_a_heading_of_a_guide_or_out() -> None:
    rendered = {name: guides.guide(name).text for name in guides.names()}
    anchors = {name: set(re.findall(r'<h\d id="([^"]+)"', text)) for name, text in rendered.items()}
    seen = 0
    for name, text in rendered.items():
        inside = INTERNAL.findall(text)
        assert len(inside) + len(re.findall(r'href="https?://', text)) == text.count("href="), "no other kind of link"
        for target, anchor in inside:
            seen += 1
            assert not anchor or anchor in anchors[target or name], f"{name}: {target}#{anchor}"
    assert seen > 100


def test_a_guide_is_a_page_of_the_console_and_linked_where_it_helps(visitor: Visitor) -> None:
    page = visitor.get("/console/guides/datasets").text
    assert '<h2 id="formats">Formats</h2>' in page
    assert "<code>&lt;think&gt;</code>" in page, "text of a guide is never markup"
    assert 'href="/console/guides/datasets"' in visitor.get("/console/datasets/new").text
    assert 'href="/console/guides/methods"' in visitor.get("/console/jobs/new").text
    assert "Documentation" in visitor.get("/console/guides").text
    assert visitor.get("/console/guides/..%2Fpyproject").status_code == 404
    assert visitor.get("/console/guides/nothing").status_code == 404
