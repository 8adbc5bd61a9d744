"""What the gateway got for a chat completion, as the answer to a response request: whole, streamed, or a refusal."""

from __future__ import annotations

import json

from fastapi import Response
from fastapi.responses import JSONResponse, StreamingResponse

from control_plane.serving.responses.events import ResponseStream
from control_plane.serving.responses.requests import ResponseRequest
from control_plane.serving.responses.response_objects import whole_response
from core.errors import Unavailable

KEPT_HEADERS = ("x-ft-model", "x-ft-adapter")


def translate(answer: Response, asked: ResponseRequest) -> Response:
    """Return the gateway's `answer` in the format of responses; a stream stays open to the same server."""
    if isinstance(answer, StreamingResponse):
        stream = ResponseStream(asked.repeated, model=answer.headers["x-ft-model"], words=asked.in_callers_words)
        answer.body_iterator = stream.events(answer.body_iterator)
        return answer
    headers = {name: answer.headers[name] for name in KEPT_HEADERS if name in answer.headers}
    if answer.status_code >= 400:
        error = json.loads(bytes(answer.body))["error"]
        message, param = asked.in_callers_words(error["message"], error["param"])
        return JSONResponse({"error": {**error, "message": message, "param": param}}, status_code=answer.status_code, headers=headers)
    try:
        made = whole_response(json.loads(bytes(answer.body)), asked.repeated)
    except (ValueError, TypeError, AttributeError, LookupError) as e:
        raise Unavailable(
            "the inference server's answer is not a chat completion; send the request again", code="inference_unavailable"
        ) from e
    return JSONResponse(made, headers=headers)
