"""A browser's requests to the console, without a browser: httpx with the session's cookie and the forms of pages."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import pytest

from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants


@dataclass
class Visitor:
    """A signed-in visitor, whose forms carry the token of the page that they were on."""

    http: httpx.Client

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def token(self) -> str:
        found = re.search(r'name="csrf-token" content="([0-9a-f]{64})"', self.http.get("/console").text)
        assert found is not None
        return found[1]

    def post(self, path: str, **fields: str) -> httpx.Response:
        """Send a form as the browser would."""
        return self.http.post(path, data={"csrf_token": self.token(), **fields})


@pytest.fixture
def visit(api_url: str) -> Iterator[Callable[[str], Visitor]]:
    """Signs in with a key; follows no redirects, so that tests see them."""
    made: list[httpx.Client] = []

    def sign_in(key: str) -> Visitor:
        made.append(httpx.Client(base_url=api_url, headers={"accept": "text/html"}, timeout=60))
        answer = made[-1].post("/console/sign-in", data={"key": key})
        assert answer.status_code == 303, answer.text
        return Visitor(made[-1])

    yield sign_in
    for client in made:
        client.close()


@pytest.fixture
def visitor(visit: Callable[[str], Visitor], api_key: str) -> Visitor:
    """Signed in with the tenant's key."""
    return visit(api_key)


@pytest.fixture
def other(platform: Platform, visit: Callable[[str], Visitor]) -> Visitor:
    """Signed in as another tenant."""
    _, key = tenants.create(platform, f"other-{uuid.uuid4().hex[:12]}")
    return visit(key.secret)
