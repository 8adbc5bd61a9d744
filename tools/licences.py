"""Lists the licences of the packages and of the contamination lists in the images: ``python -m tools.licences`` writes ``THIRD-PARTY.md``.

Licences are SPDX expressions, from the metadata of the installed packages, or from `STATED` where those are vague or absent. A package
whose licence is unknown fails the command, and so does a licence that is neither permissive nor in `WELL_KNOWN_SHAPES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from email.message import Message
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import cast

from engine.data.checks.contamination.shipped_suites import shipped_suites
from tools.images import EXTRAS, locked, name
from tools.lock import ROOT

FILE = "THIRD-PARTY.md"
PERMISSIVE = frozenset({
    "0BSD", "AFL-2.1", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "HPND", "ISC", "LLVM-exception",
    "MIT", "MIT-0", "MIT-CMU", "NCSA", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib",
})  # fmt: skip
WELL_KNOWN_SHAPES: Mapping[str, str] = {
    "LGPL-2.1-or-later": "weak copyleft: used unchanged as a library; changes of it must be published",
    "LGPL-3.0-only": "weak copyleft: used unchanged as a library; changes of it must be published",
    "LGPL-3.0-or-later": "weak copyleft: used unchanged as a library; changes of it must be published",
    "MPL-2.0": "weak copyleft by file: changed files of it must be published",
    "LicenseRef-NVIDIA-Proprietary": "NVIDIA's licence: redistribution with an application, on NVIDIA GPUs",
}
"""Licences that are not permissive and are accepted, and what they ask for."""
STATED: Mapping[str, str] = {
    "antlr4-python3-runtime": "BSD-3-Clause", "chardet": "LGPL-2.1-or-later", "colorama": "BSD-3-Clause", "gitdb": "BSD-3-Clause",
    "hjson": "MIT OR AFL-2.1", "jinja2": "BSD-3-Clause", "mlflow-skinny": "Apache-2.0", "mpmath": "BSD-3-Clause", "numba": "BSD-2-Clause",
    "pathlib-abc": "PSF-2.0", "psycopg2-binary": "LGPL-3.0-or-later", "pyasn1-modules": "BSD-2-Clause",
    "python-dateutil": "Apache-2.0 OR BSD-3-Clause", "python-stdnum": "LGPL-2.1-or-later", "scipy": "BSD-3-Clause",
    "sqlparse": "BSD-3-Clause", "sympy": "BSD-3-Clause",
    # Only the GPU build of torch needs these, so they are not installed where there is none.
    "cuda-bindings": "LicenseRef-NVIDIA-Proprietary", "cuda-pathfinder": "Apache-2.0", "cuda-toolkit": "LicenseRef-NVIDIA-Proprietary",
    "triton": "MIT",
}  # fmt: skip
"""By package, where metadata say only "BSD", quote the whole text, or are not at hand; to compare with licence files before a release."""
OF_NVIDIA = re.compile(r"nvidia-")
TEXTS: Mapping[str, str] = {
    "3-clause bsd license": "BSD-3-Clause", "apache": "Apache-2.0", "apache 2.0": "Apache-2.0", "apache 2.0 license": "Apache-2.0",
    "apache license": "Apache-2.0", "apache license 2.0": "Apache-2.0", "apache license version 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0", "apache software license": "Apache-2.0", "apache software license 2.0": "Apache-2.0",
    "isc license": "ISC", "isc license (iscl)": "ISC", "mit license": "MIT", "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "psfl": "PSF-2.0", "python software foundation license": "PSF-2.0", "the mit license (mit)": "MIT",
}  # fmt: skip
"""What packages write in their metadata for an SPDX id, in lower case."""
ID = re.compile(r"[A-Za-z0-9.+-]+")


def licence_of(package: str) -> str | None:
    """Return the SPDX expression of an installed package; None if it is unknown."""
    if package in STATED or OF_NVIDIA.match(package):
        return STATED.get(package, "LicenseRef-NVIDIA-Proprietary")
    try:
        found = cast(Message, metadata(package))
    except PackageNotFoundError:
        return None
    classifiers = [c.rpartition(" :: ")[2] for c in found.get_all("Classifier", []) if c.startswith("License ::")]
    texts = (found.get("License-Expression"), found.get("License"), *classifiers)
    return next((spdx for text in texts if text and (spdx := _spdx(text))), None)


def _spdx(text: str) -> str | None:
    """Return `text` as an SPDX expression of licences that are known here; None if it is none."""
    text = text.strip().splitlines()[0]  # some quote the whole licence
    by_name = {one.lower(): one for one in (*PERMISSIVE, *WELL_KNOWN_SHAPES)}
    if (stated := TEXTS.get(text.lower())) or (stated := by_name.get(text.lower())):
        return stated
    return text if ids(text) and ids(text) <= {*PERMISSIVE, *WELL_KNOWN_SHAPES} else None


def ids(expression: str) -> set[str]:
    """Return the licences and exceptions of an SPDX expression."""
    return set(ID.findall(expression)) - {"AND", "OR", "WITH"}


def by_package(packages: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return version and licence of each package of a lock by its name; ``SystemExit`` naming those without a known licence."""
    found = {name(package): (package.split()[0].partition("==")[2], licence_of(name(package))) for package in packages}
    if unknown := sorted(package for package, (_, licence) in found.items() if licence is None):
        raise SystemExit(f"licence unknown: {', '.join(unknown)}; read its licence file and add it to STATED in tools/licences.py")
    return {package: (version, str(licence)) for package, (version, licence) in sorted(found.items())}


def render(packages: Mapping[str, tuple[str, str]], control_plane: Iterable[str]) -> str:
    """Return the page: licences that are not permissive first, then every package."""
    in_both = set(control_plane)
    rows = [f"| {p} | {v} | {licence} | {'both' if p in in_both else 'trainer'} |" for p, (v, licence) in packages.items()]
    named = [
        f"- `{one}`, {why}: {', '.join(p for p, (_, licence) in packages.items() if one in ids(licence))}."
        for one, why in sorted(WELL_KNOWN_SHAPES.items())
        if any(one in ids(licence) for _, licence in packages.values())
    ]
    return "\n".join([HEAD, "## Not permissive", "", *named, "", "## All", "", TABLE, *rows, "", *lists()])


def lists() -> list[str]:
    """Return the section of the contamination lists that ship."""
    rows = [f"| {one.name} | {one.num_items:,} | {one.license} | {one.name}.license.txt |" for one in shipped_suites()]
    return [LISTS, *rows, ""]


HEAD = """# Third-party packages

Packages in the images of the control plane and of the trainer, with the GPU build of torch. Made from the lock files by
`python -m tools.licences`. Each package's licence text is in its `dist-info` folder in the images. Debian's packages in the base image
have theirs in `/usr/share/doc`.
"""
LISTS = """## Contamination lists

Hashes of 13-grams of public benchmarks, without their text, in `engine/data/checks/contamination/hashed_suites`, each with the
notice of its licence.

| list | items | licence (SPDX) | notice |
|---|---|---|---|"""
TABLE = "| package | version | licence (SPDX) | image |\n|---|---|---|---|"


def current() -> str:
    """Return the page for the packages that are locked now; asks the package index which packages an image needs."""
    images = {image: locked(extras, cpu=False) for image, extras in EXTRAS.items()}
    return render(by_package(images["trainer"]), map(name, images["control-plane"]))


def is_current(root: Path = ROOT) -> bool:
    return (root / FILE).read_text() == current()


if __name__ == "__main__":
    (ROOT / FILE).write_text(current())
    print(FILE)
