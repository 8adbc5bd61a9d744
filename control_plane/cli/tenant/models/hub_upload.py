"""Child process that uploads to a Hugging Face Hub: a request as JSON on stdin, the answer as JSON on stdout.

A separate process, because huggingface_hub reads its environment on import; and on the user's machine, so that the user's token reaches
only the Hub.

    {"endpoint", "token", "repo", "directory", "message", "private"} -> {"url", "commit"} | {"error", "detail"}

If `private` is set and the repository already exists and is public, nothing is uploaded: ``error`` is ``public``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TIMEOUT_S = 6 * 3600.0


def upload(request: dict[str, Any], *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Return the answer of an uploading process; it knows no token except the one in `request`."""
    with tempfile.TemporaryDirectory(prefix="ft-push-") as home:
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING_FACE", "TRANSFORMERS_"))},
            "HF_HOME": home,
            "HF_ENDPOINT": str(request["endpoint"]),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        command = [sys.executable, "-m", "control_plane.cli.tenant.models.hub_upload"]
        body = json.dumps({**request, "directory": str(request["directory"])})
        try:
            done = subprocess.run(command, input=body, capture_output=True, text=True, env=environment, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return {"error": "unreachable", "detail": f"the upload did not end within {timeout_s:g} s"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"error": "unreachable", "detail": (done.stderr.strip() or f"the upload ended with code {done.returncode}")[-300:]}
    return answer


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    import huggingface_hub as hub
    from huggingface_hub import errors

    api = hub.HfApi(endpoint=request["endpoint"], token=request["token"])
    try:
        if request["private"] and _is_public(api, request["repo"]):
            return {"error": "public", "detail": ""}
        made = api.create_repo(request["repo"], private=request["private"], exist_ok=True)
        commit = api.upload_folder(repo_id=request["repo"], folder_path=Path(request["directory"]), commit_message=request["message"])
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        return {"error": "refused" if status in (401, 403) else "unreachable", "detail": str(error).splitlines()[0][:300]}
    except Exception as error:  # any error of the network or library: the caller words it
        return {"error": "unreachable", "detail": f"{type(error).__name__}: {error}"[:300]}
    return {"url": str(made), "commit": commit.oid}


def _is_public(api: Any, repo: str) -> bool:
    from huggingface_hub import errors

    try:
        return not api.repo_info(repo).private
    except errors.RepositoryNotFoundError:
        return False


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_answer(json.load(sys.stdin))))
