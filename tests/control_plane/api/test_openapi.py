"""The published description of the API changes only on purpose.

``FT_UPDATE_SNAPSHOTS=1 pytest tests/control_plane/api/test_openapi.py`` writes it.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from control_plane.api.openapi import Described

SNAPSHOT = Path(__file__).with_name("openapi.json")


def test_the_description_is_the_one_that_was_reviewed(api_url: str) -> None:
    described = httpx.get(f"{api_url}/openapi.json", timeout=60).json()
    if os.environ.get("FT_UPDATE_SNAPSHOTS"):
        SNAPSHOT.write_text(json.dumps(described, indent=1, sort_keys=True) + "\n")
    assert described == json.loads(SNAPSHOT.read_text()), "the API changed; if it was meant to, update the snapshot and the changelog"


def test_every_operation_says_what_it_does() -> None:
    described = json.loads(SNAPSHOT.read_text())
    operations = [(path, method, op) for path, methods in described["paths"].items() for method, op in methods.items()]
    assert len(operations) > 25
    assert [(path, method) for path, method, op in operations if not op.get("description")] == []


def test_the_first_requests_at_once_get_the_finished_description() -> None:
    api = Described(title="t")
    for n in range(100):
        api.add_api_route(f"/{n}/{{of}}", lambda of: of, methods=["POST"], name=str(n))

    def described(delay_s: float) -> str:
        time.sleep(delay_s)
        return json.dumps(api.openapi())

    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(described, [n / 200 for n in range(20)]))
    assert set(found) == {json.dumps(api.openapi())}
    assert '"422"' not in found[0]
