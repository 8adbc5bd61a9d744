"""The error hierarchy: every failure visible to users, billing or retry decisions.

    FtError
      +- InvalidRequest      user       400   the request cannot be carried out as written
      |   +- InvalidDataset  user       400   rows that cannot be trained on
      |   +- QuotaExceeded   user       429   the request would exceed a limit of the tenant
      +- Unauthenticated     user       401   API key missing, unknown, expired or revoked
      +- Forbidden           user       403   the key lacks the scope
      +- NotFound            user       404   the tenant has no such object
      +- Conflict            user       409   the object's state forbids the call
      +- LineageIncomplete   platform   500   a record has a gap in its lineage
      +- NotAdmitted         ambiguous  409   training was started without a reservation
      +- RateLimited         user       429   more requests per minute than allowed
      +- Unavailable         platform   503   a part of the platform did not respond
      +- IntegrityError      platform   500   stored bytes differ from what was written

``fault`` decides who pays (billing refunds platform faults), ``code`` is stable and documented in ``docs/errors.md``, and the message names
the value, the limit and the next step.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, ClassVar


class Fault(enum.StrEnum):
    """Who is responsible for a failure."""

    USER = "user"
    PLATFORM = "platform"
    AMBIGUOUS = "ambiguous"


class FtError(Exception):
    """Base class. Instances survive pickling and JSON with all of their fields."""

    default_code: ClassVar[str] = "server_error"
    fault: ClassVar[Fault] = Fault.PLATFORM
    http_status: ClassVar[int] = 500
    request_id: str | None = None
    """Id of the API call that returned it, if any: an operator finds it by this id."""

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.code, self.param), {"request_id": self.request_id})

    def to_dict(self) -> dict[str, str | None]:
        """Returns ``{code, message, param}``: the content of a job's ``error`` field and of an API error body."""
        return {"code": self.code, "message": self.message, "param": self.param}


def _rebuild(cls: type[FtError], message: str, code: str, param: str | None) -> FtError:
    return cls(message, code=code, param=param)


class InvalidRequest(FtError):
    """The request cannot be carried out as written; repeating it gives the same result."""

    default_code = "invalid_request"
    fault = Fault.USER
    http_status = 400


class BodyTooLarge(InvalidRequest):
    """The body of a request exceeds the limit of its path."""

    default_code = "body_too_large"
    http_status = 413


class BodyTooSlow(InvalidRequest):
    """The body of a request came too slowly."""

    default_code = "body_too_slow"
    http_status = 408


class InvalidDataset(InvalidRequest):
    """A file whose rows cannot be trained on; the report lists every bad row."""

    default_code = "invalid_training_file"
    options: str = ""
    """Options of ``ft check`` and ``ft upload`` that would read the file, such as ``--encoding windows-1252``; empty if none would."""

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, fields, state = super().__reduce__()
        return rebuild, fields, state | {"options": self.options}


class QuotaExceeded(InvalidRequest):
    """Admission would exceed one of the tenant's limits."""

    default_code = "exceeded_quota"
    http_status = 429


class Unauthenticated(FtError):
    """API key missing, unknown, expired or revoked."""

    default_code = "invalid_api_key"
    fault = Fault.USER
    http_status = 401


class Forbidden(FtError):
    """The key is valid but lacks the scope that the call requires."""

    default_code = "insufficient_scope"
    fault = Fault.USER
    http_status = 403


class NotFound(FtError):
    """No such object of this tenant; another tenant's object looks the same."""

    default_code = "not_found"
    fault = Fault.USER
    http_status = 404


class Conflict(FtError):
    """The object's current state forbids the call."""

    default_code = "invalid_state"
    fault = Fault.USER
    http_status = 409


class RateLimited(FtError):
    """More requests than the key, or an address without one, may send; retry after a moment."""

    default_code = "rate_limit_exceeded"
    fault = Fault.USER
    http_status = 429


class LineageIncomplete(FtError):
    """A record was not registered because of a gap in its lineage."""

    default_code = "lineage_incomplete"


class NotAdmitted(FtError):
    """Training was started for a job without a reservation; nothing was run."""

    default_code = "not_admitted"
    fault = Fault.AMBIGUOUS
    http_status = 409


class Unavailable(FtError):
    """A part of the platform did not answer; a retry may succeed."""

    default_code = "unavailable"
    http_status = 503


class IntegrityError(FtError):
    """Stored bytes differ from what was written (digest mismatch, torn file)."""

    default_code = "integrity_error"


def family(root: type[FtError] = FtError) -> list[type[FtError]]:
    """Returns every class of the family, root first, depth first; the documentation test uses it."""
    return [root, *(c for sub in root.__subclasses__() for c in family(sub))]


def from_dict(data: dict[str, Any], cls: type[FtError] = FtError) -> FtError:
    """Rebuilds an error from :meth:`FtError.to_dict`, as the class that owns its code if there is one."""
    by_code: dict[str, type[FtError]] = {c.default_code: c for c in family()}
    kind = by_code.get(str(data["code"]), cls)
    return kind(str(data["message"]), code=str(data["code"]), param=data.get("param"))


SIMILAR = 0.6
"""Similarity from which a name is suggested: difflib's default. It finds `max_seq_len` for `max_seq_length`, and nothing for `foo`."""
LONGEST_NAME = 80
"""Characters of a name that are compared; matching takes time in proportion to the product of both lengths."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean rank or alpha?``, to end a message with, or an empty string if none of `known` is close."""
    by_lower = {one.lower(): one for one in known}
    close = [by_lower[one] for one in get_close_matches(name[:LONGEST_NAME].lower(), by_lower, n=2, cutoff=SIMILAR)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


__all__ = ["Fault", "FtError", "did_you_mean", "family", "from_dict"] + [c.__name__ for c in family() if c is not FtError]
