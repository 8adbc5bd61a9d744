"""Refusals and failures of the embedded server, answered with OpenAI's error body."""

from __future__ import annotations


class EngineError(Exception):
    """The engine could not finish a request."""


class RequestError(Exception):
    """An invalid request, answered with OpenAI's error body."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param


def unknown_model(name: str) -> RequestError:
    return RequestError(f"The model `{name[:200]}` does not exist.", status=404, code="model_not_found", param="model")
