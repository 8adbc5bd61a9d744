"""Writes a bill of materials in CycloneDX for each image: ``python -m tools.sbom [DIRECTORY]`` (default: build/sbom).

They list the locked Python packages with hashes and licences, as an image with the GPU build of torch has them, not Debian's packages of
the base image. The same lock gives the same bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tools.images import EXTRAS, locked
from tools.licences import by_package
from tools.lock import ROOT

SCHEMA = SchemaVersion.V1_6


def write(directory: Path) -> list[Path]:
    """Write a file for each image and return them."""
    directory.mkdir(parents=True, exist_ok=True)
    made = []
    for image, extras in EXTRAS.items():
        file = directory / f"{image}.cdx.json"
        file.write_text(json.dumps(bill(image, locked(extras, cpu=False)), indent=1) + "\n")
        made.append(file)
    return made


def bill(image: str, packages: Sequence[str]) -> Mapping[str, Any]:
    """Return the bill of materials of `packages`, as the lock has them; ``SystemExit`` if it does not follow the schema."""
    tool = str(Path(sys.executable).with_name("cyclonedx-py"))
    options = (
        "--pyproject",
        "pyproject.toml",
        "--mc-type",
        "application",
        "--short-PURLs",
        "--output-reproducible",
        "--sv",
        SCHEMA.to_version(),
    )
    done = subprocess.run(
        [tool, "requirements", *options, "-"], input="".join(packages), check=True, cwd=ROOT, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    licences = by_package(packages)
    for component in found["components"]:
        component["licenses"] = [{"expression": licences[component["name"].lower().replace("_", "-")][1]}]
    found["metadata"]["component"]["name"] = f"ft-{image}"
    if (error := JsonStrictValidator(SCHEMA).validate_str(json.dumps(found))) is not None:
        raise SystemExit(f"the bill of materials of {image} does not follow CycloneDX {SCHEMA.to_version()}: {error}")
    return found


if __name__ == "__main__":
    for path in write(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "sbom"):
        print(path)
