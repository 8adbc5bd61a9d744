"""A store that speaks S3 and, unlike moto alone, refuses bytes that do not match the checksum signed with their URL."""

from __future__ import annotations

import base64
import hashlib
import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from urllib.parse import parse_qs

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def checked_s3(host: str = "127.0.0.1") -> AbstractContextManager[tuple[str, int]]:
    """Serve it and return its host and port."""
    return served_s3(checked, host=host)


@contextmanager
def served_s3(wrapped: Callable[[Application], Application], *, host: str = "127.0.0.1", ahead_s: float = 0.0) -> Iterator[tuple[str, int]]:
    """Serve moto as `wrapped` changes it; its clock is `ahead_s` ahead of this machine's."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    class Handler(MotoRequestHandler):  # type: ignore[misc]
        def date_time_string(self, timestamp: float | None = None) -> str:
            return str(super().date_time_string((timestamp or time.time()) + ahead_s))

    moto = DomainDispatcherApplication(create_backend_app)
    server = make_server(host, 0, wrapped(moto), threaded=True, request_handler=Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield host, server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def checked(application: Application) -> Application:
    """Answer as S3 does: ``BadDigest`` to other bytes, ``AccessDenied`` to a checksum that was not signed."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        checksum = environ.get("HTTP_X_AMZ_CHECKSUM_SHA256")
        if environ["REQUEST_METHOD"] != "PUT" or checksum is None:
            return application(environ, start_response)
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        signed = parse_qs(environ["QUERY_STRING"]).get("X-Amz-SignedHeaders", [""])[0].split(";")
        if "x-amz-checksum-sha256" not in signed:
            return _refused(start_response, "403 Forbidden", "AccessDenied")
        if base64.b64encode(hashlib.sha256(body).digest()).decode() != checksum:
            return _refused(start_response, "400 Bad Request", "BadDigest")
        return application({**environ, "wsgi.input": io.BytesIO(body)}, start_response)

    return answer


def _refused(start_response: Callable[..., Any], status: str, code: str) -> list[bytes]:
    start_response(status, [("content-type", "application/xml")])
    return [f"<Error><Code>{code}</Code></Error>".encode()]
