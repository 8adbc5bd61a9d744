"""A store that speaks S3 and, unlike moto alone, refuses a signed URL that was changed, has expired, or comes with headers nobody signed.

The signature is computed here as Amazon describes it ("Authenticating Requests: Using Query Parameters"), without the library that signs.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, quote

from tests.support.servers.checked_s3 import Application, checked, served_s3

ACCOUNT = {"region_name": "us-east-1", "aws_access_key_id": "test", "aws_secret_access_key": "secret"}
SIGNATURE = "X-Amz-Signature"


@contextmanager
def signed_s3(*, clock: Callable[[], float] = time.time) -> Iterator[str]:
    """Serve it and return its address. Requests that no URL signs pass: they are the platform's own."""

    def verified(application: Application) -> Application:
        inner = checked(application)

        def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            query = dict(parse_qsl(environ["QUERY_STRING"], keep_blank_values=True))
            if SIGNATURE in query and (refusal := _refusal(environ, query, clock())):
                start_response("403 Forbidden", [("content-type", "application/xml")])
                return [f"<Error><Code>{refusal}</Code></Error>".encode()]
            return inner(environ, start_response)

        return answer

    with served_s3(verified) as (host, port):
        yield f"http://{host}:{port}"


def _refusal(environ: dict[str, Any], query: dict[str, str], now: float) -> str | None:
    signature, scope = query.pop(SIGNATURE), query["X-Amz-Credential"].split("/")[1:]
    names = query["X-Amz-SignedHeaders"].split(";")
    sent = {name[5:].replace("_", "-").lower(): str(value) for name, value in environ.items() if name.startswith("HTTP_")}
    if any(name.startswith("x-amz-") and name not in names for name in sent):
        return "AccessDenied"
    encoded = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in query.items())
    request = "\n".join([
        environ["REQUEST_METHOD"], environ["RAW_URI"].partition("?")[0], "&".join(f"{name}={value}" for name, value in encoded),
        *(f"{name}:{sent.get(name, '').strip()}" for name in names), "", ";".join(names), "UNSIGNED-PAYLOAD",
    ])  # fmt: skip
    signed = "\n".join([query["X-Amz-Algorithm"], query["X-Amz-Date"], "/".join(scope), hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{ACCOUNT['aws_secret_access_key']}".encode()
    for part in scope:
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    if not hmac.compare_digest(hmac.new(key, signed.encode(), hashlib.sha256).hexdigest(), signature):
        return "SignatureDoesNotMatch"
    begun = datetime.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    return None if begun - 900 <= now <= begun + int(query["X-Amz-Expires"]) else "AccessDenied"
