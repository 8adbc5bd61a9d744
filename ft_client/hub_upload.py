"""Child process that uploads to a Hugging Face Hub: a request as JSON on stdin, the answer as JSON on stdout.

A separate process, because huggingface_hub reads its environment on import; and on the user's machine, so that the user's token reaches
only the Hub.

    Upload -> Pushed | Refused

If `private` is set and the repository already exists and is public, nothing is uploaded: ``error`` is ``public``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import Any, Literal

TIMEOUT_S = 6 * 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    endpoint: str
    token: str
    repo: str
    directory: str
    message: str
    private: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    url: str
    commit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    error: Literal["public", "refused", "unreachable"]
    detail: str


def upload(request: Upload, *, timeout_s: float = TIMEOUT_S) -> Pushed | Refused:
    """Return the answer of an uploading process; it knows no token except the one in `request`."""
    with tempfile.TemporaryDirectory(prefix="ft-push-") as home:
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING_FACE", "TRANSFORMERS_"))},
            "HF_HOME": home,
            "HF_ENDPOINT": request.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        command = [sys.executable, "-m", "ft_client.hub_upload"]
        body = json.dumps(asdict(request))
        try:
            done = subprocess.run(command, input=body, capture_output=True, text=True, env=environment, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return Refused(error="unreachable", detail=f"the upload did not end within {timeout_s:g} s")
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        return Refused(error="unreachable", detail=(done.stderr.strip() or f"the upload ended with code {done.returncode}")[-300:])
    return Refused(**answer) if "error" in answer else Pushed(**answer)


def _answer(request: Upload) -> Pushed | Refused:
    import huggingface_hub as hub
    from huggingface_hub import errors

    from engine.data import restrict_hub_session

    restrict_hub_session(request.endpoint)
    api = hub.HfApi(endpoint=request.endpoint, token=request.token)
    try:
        if request.private and _is_public(api, request.repo):
            return Refused(error="public", detail="")
        made = api.create_repo(request.repo, private=request.private, exist_ok=True)
        commit = api.upload_folder(repo_id=request.repo, folder_path=request.directory, commit_message=request.message)
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        return Refused(error="refused" if status in (401, 403) else "unreachable", detail=str(error).splitlines()[0][:300])
    except Exception as error:  # any error of the network or library: the caller words it
        return Refused(error="unreachable", detail=f"{type(error).__name__}: {error}"[:300])
    return Pushed(url=str(made), commit=commit.oid)


def _is_public(api: Any, repo: str) -> bool:
    from huggingface_hub import errors

    try:
        return not api.repo_info(repo).private
    except errors.RepositoryNotFoundError:
        return False


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_answer(Upload(**json.load(sys.stdin))))))
