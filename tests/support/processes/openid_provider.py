"""An OpenID provider in a process of its own: ``oidc-provider-mock``, which signs real tokens, and PKCE, which it does not check itself.

Claims of a person replace those of the token, so that a test can have a wrong audience, nonce or time. The claim ``userinfo`` has those
that only the userinfo endpoint answers, in place of the token's.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote_plus, urlsplit

import httpx

CLIENT = "ft-console"
SECRET = "a secret: 100% & more"
START_S = 60


@dataclass(frozen=True)
class Provider:
    url: str

    def person(self, address: str, **claims: Any) -> str:
        """Add a person with a verified address, without the claims that are None; returns what they sign in as."""
        subject = hashlib.sha256(address.encode()).hexdigest()[:12]
        values = {"email": address, "email_verified": True, **claims}
        httpx.put(f"{self.url}/users/{subject}", json={k: v for k, v in values.items() if v is not None}).raise_for_status()
        return subject

    def allow(self, authorization_url: str, subject: str) -> str:
        """Sign `subject` in and agree, as a browser would with the provider's form; returns where the browser is sent."""
        answer = httpx.post(authorization_url, data={"sub": subject})
        assert answer.status_code == 302, answer.text
        return answer.headers["location"]

    def deny(self, authorization_url: str) -> str:
        return httpx.post(authorization_url, data={"action": "deny"}).headers["location"]


@contextmanager
def openid_provider(*, port: int = 0) -> Iterator[Provider]:
    """Run a provider with new keys."""
    with socket.create_server(("localhost", port)) as held:
        port = held.getsockname()[1]
    env = {**os.environ, "AUTHLIB_INSECURE_TRANSPORT": "1"}
    command = [sys.executable, "-W", "ignore", __file__, str(port)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                httpx.get(f"http://localhost:{port}/jwks").raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None, "the provider ended at its start"
                assert time.monotonic() < deadline, f"the provider did not start in {START_S} s"
                time.sleep(0.1)
        yield Provider(f"http://localhost:{port}")
    finally:
        process.terminate()
        process.wait(timeout=30)


class Strict:
    """WSGI middleware: redeems a code only with the client's secret and the verifier of its challenge."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app
        self._challenges: dict[str, str] = {}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        path = environ["PATH_INFO"]
        if path == "/oauth2/token":
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            environ["wsgi.input"] = io.BytesIO(body)
            if (error := self._fault(environ.get("HTTP_AUTHORIZATION", ""), parse_qs(body.decode()))) is not None:
                start_response("400 BAD REQUEST", [("content-type", "application/json")])
                return [json.dumps({"error": error}).encode()]
        if path == "/userinfo":
            return self._user_info(environ, start_response)
        if path != "/oauth2/authorize":
            return self._app(environ, start_response)
        query = parse_qs(environ["QUERY_STRING"])

        def noting(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            to = next((value for name, value in headers if name.lower() == "location"), "")
            for code in parse_qs(urlsplit(to).query).get("code", []):
                assert query["code_challenge_method"] == ["S256"]
                self._challenges[code] = query["code_challenge"][0]
            if "error=" in to and "state=" not in to:  # the specification requires it, and the library leaves it out
                headers = [(name, value) for name, value in headers if name.lower() != "location"]
                headers.append(("location", f"{to}&state={query['state'][0]}"))
            return start_response(status, headers, *rest)

        return self._app(environ, noting)

    def _user_info(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        head: list[Any] = []
        claims = json.loads(b"".join(self._app(environ, lambda *given: head.extend(given))))
        body = json.dumps({**claims, **claims.pop("userinfo", {})}).encode()
        start_response(head[0], [(name, value) for name, value in head[1] if name.lower() != "content-length"])
        return [body]

    def _fault(self, authorization: str, fields: dict[str, list[str]]) -> str | None:
        client, _, secret = base64.b64decode(authorization.removeprefix("Basic ")).decode().partition(":")
        if (unquote_plus(client), unquote_plus(secret)) != (CLIENT, SECRET):
            return "invalid_client"
        digest = hashlib.sha256(fields.get("code_verifier", [""])[0].encode()).digest()
        challenge = self._challenges.pop(fields.get("code", [""])[0], None)
        return None if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == challenge else "invalid_grant"


def main() -> None:
    import logging

    from oidc_provider_mock import app
    from werkzeug.serving import make_server

    logging.disable(logging.WARNING)
    made = app()
    made.wsgi_app = Strict(made.wsgi_app)  # type: ignore[method-assign]
    make_server("localhost", int(sys.argv[1]), made, threaded=True).serve_forever()


if __name__ == "__main__":
    main()
