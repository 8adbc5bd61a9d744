"""Licences of the packages in the images are known, and bills of materials follow the standard."""

from __future__ import annotations

import re

import pytest

from tools import licences, sbom
from tools.lock import LOCK, ROOT, packages_of

PACKAGES = {package.partition("==")[0]: package for package in packages_of((ROOT / LOCK).read_text())}


def test_every_package_of_the_list_is_the_locked_one_and_its_licence_is_accepted() -> None:
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \| (?:both|trainer) \|$", (ROOT / licences.FILE).read_text(), re.MULTILINE)
    assert len(rows) > 150
    locked = {name: package.split()[0].partition("==")[2] for name, package in PACKAGES.items()}
    of_cuda = {name for name, *_ in rows} - set(locked)
    assert all(name.startswith(("nvidia-", "cuda-")) or name == "triton" for name in of_cuda)
    assert {name: version for name, version, _ in rows if name in locked} == {name: locked[name] for name, *_ in rows if name in locked}
    for name, _, licence in rows:
        assert licences.licence_of(name) == licence
        assert licences.ids(licence) <= {*licences.PERMISSIVE, *licences.WELL_KNOWN_SHAPES}, name


def test_an_unknown_licence_fails_and_is_named() -> None:
    with pytest.raises(SystemExit, match="licence unknown: no-such-package"):
        licences.by_package(["no-such-package==1\n", PACKAGES["fastapi"]])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MIT", "MIT"), ("The MIT License (MIT)\n\nCopyright", "MIT"), ("Apache 2.0", "Apache-2.0"), ("bsd-3-clause", "BSD-3-Clause"),
        ("Apache-2.0 OR BSD-3-Clause", "Apache-2.0 OR BSD-3-Clause"), ("MPL-2.0 AND MIT", "MPL-2.0 AND MIT"),
        ("BSD", None), ("GPL-3.0-only", None), ("MIT AND GPL-3.0-only", None), ("Proprietary", None),
    ],
)  # fmt: skip
def test_a_text_is_an_expression_of_accepted_licences_or_unknown(text: str, expected: str | None) -> None:
    assert licences._spdx(text) == expected


def test_licences_that_are_not_permissive_come_first_with_what_they_ask_for() -> None:
    page = licences.render({"a": ("1", "MIT"), "b": ("2", "MPL-2.0 AND MIT")}, ["a"])
    assert page.index("`MPL-2.0`, weak copyleft by file: changed files of it must be published: b.") < page.index("| a | 1 | MIT | both |")
    assert "| b | 2 | MPL-2.0 AND MIT | trainer |" in page


@pytest.mark.slow
def test_a_bill_of_materials_has_hashes_and_licences_and_is_the_same_again() -> None:
    chosen = [PACKAGES[name] for name in ("fastapi", "psycopg", "jinja2")]
    made = sbom.bill("control-plane", chosen)
    assert (made["bomFormat"], made["specVersion"], made["metadata"]["component"]["name"]) == ("CycloneDX", "1.6", "ft-control-plane")
    parts = {part["name"]: part for part in made["components"]}
    assert parts["psycopg"]["licenses"] == [{"expression": "LGPL-3.0-only"}] and parts["fastapi"]["purl"].startswith("pkg:pypi/fastapi@")
    hashes = {one["content"] for reference in parts["jinja2"]["externalReferences"] for one in reference.get("hashes", ())}
    assert hashes == set(re.findall(r"sha256:([0-9a-f]{64})", PACKAGES["jinja2"])) and hashes
    assert made == sbom.bill("control-plane", chosen)
