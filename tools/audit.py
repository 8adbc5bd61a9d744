"""Reports known vulnerabilities of the locked packages: ``python -m tools.audit [FILE ...]``.

Exits with 0 if none is known, 1 if some are, and 3 if no advisory source answered. pip-audit's own variables choose the source
(``PIP_AUDIT_VULNERABILITY_SERVICE``, ``PIP_AUDIT_OSV_URL``); by default PyPI is tried, then OSV.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tools.lock import CUDA, LOCK, ROOT

NONE_KNOWN, VULNERABLE, NO_ANSWER = 0, 1, 3
SERVICES = ("pypi", "osv")
SERVICE_VARIABLE = "PIP_AUDIT_VULNERABILITY_SERVICE"


def audit(files: Sequence[str]) -> int:
    """Queries one source after the other, prints the first result, and returns the exit code."""
    requested = [os.environ[SERVICE_VARIABLE]] if os.environ.get(SERVICE_VARIABLE) else SERVICES
    refusals = []
    for service in requested:
        found, refusal = _ask(service, files)
        if found is not None:
            return _report(found, service)
        refusals.append(f"{service}: {refusal}")
    print(f"no advisory source responded, so vulnerabilities are unknown: {'; '.join(refusals)}", file=sys.stderr)
    return NO_ANSWER


def _ask(service: str, files: Sequence[str]) -> tuple[list[dict[str, Any]] | None, str]:
    """Returns packages with the source's findings on each; None, and the reason, if it does not answer."""
    named = [part for file in files for part in ("--requirement", file)]
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--progress-spinner", "off", "--format", "json"]
    done = subprocess.run([*command, "--vulnerability-service", service, *named], capture_output=True, text=True, check=False)
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except ValueError:
        return None, (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    if all("skip_reason" in package for package in packages):
        return None, packages[0]["skip_reason"] if packages else "no packages"
    return packages, ""


def _report(packages: Sequence[dict[str, Any]], service: str) -> int:
    known = [(package, vuln) for package in packages for vuln in package.get("vulns", ())]
    for package, vuln in known:
        fixed = f"; fixed in {', '.join(vuln['fix_versions'])}" if vuln["fix_versions"] else ""
        print(f"{package['name']} {package['version']}: {vuln['id']}{fixed}")
    for package in packages:
        if "skip_reason" in package:
            print(f"{package['name']}: not audited: {package['skip_reason']}")
    print(f"{len(packages)} packages, {len(known)} known vulnerabilities (source: {service})")
    return VULNERABLE if known else NONE_KNOWN


if __name__ == "__main__":
    sys.exit(audit(sys.argv[1:] or [str(ROOT / name) for name in (LOCK, CUDA)]))
