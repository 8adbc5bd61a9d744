"""The only process that talks to a Hugging Face Hub: a request as JSON on stdin, the response as JSON on stdout.

It runs separately because huggingface_hub reads its environment once, on import: the platform is offline by default, and only the endpoint
that its operator has set may be contacted. The token is part of the request, never of arguments or a file; without one, a token on the
machine is not used.

    {"op": "sha", repo, revision}             -> {"sha": ...}          (repo_type, if not "dataset", in each)
    {"op": "list", repo, revision}            -> {"files": [{"path", "size", "oid", "sha256"}], "readme": text}
    {"op": "download", repo, revision, paths, target} -> {}
    any                                       -> {"error": "absent|gated|revision|offline|unreachable", "detail": ...}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MAX_README_BYTES = 1 << 20
"""Bytes of a dataset card; only its front matter is read."""
TIMEOUT_S = 6 * 3600.0
"""Seconds for a download: 10 GB at half a megabyte per second."""


def ask(request: dict[str, Any], *, home: Path, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Returns the response of a client process to `request`; `home` receives the library's own files."""
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING_FACE", "TRANSFORMERS_"))},
        "HF_HOME": str(home),
        "HF_ENDPOINT": str(request["endpoint"]),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    command = [sys.executable, "-m", "ft_assets.datasets.readers.hub.hub_client"]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, env=environment, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": "unreachable", "detail": f"no answer within {timeout_s:.0f} s"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"error": "unreachable", "detail": (done.stderr.strip() or f"the client ended with code {done.returncode}")[-300:]}
    return answer


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        return _do(request, hub.HfApi(endpoint=request["endpoint"], token=request.get("token") or False))
    except errors.GatedRepoError as error:
        return {"error": "gated", "detail": _first_line(error)}
    except errors.RepositoryNotFoundError as error:
        return {"error": "absent", "detail": _first_line(error)}
    except errors.LocalEntryNotFoundError as error:  # no response, and no local copy
        return {"error": "unreachable", "detail": _first_line(error)}
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        return {"error": "revision", "detail": _first_line(error)}
    except errors.HFValidationError as error:
        return {"error": "absent", "detail": _first_line(error)}
    except Exception as error:  # the network, the disk or the library may raise anything: the caller words it
        return {"error": "unreachable", "detail": f"{type(error).__name__}: {_first_line(error)}"}


def _do(request: dict[str, Any], api: Any) -> dict[str, Any]:
    repo, revision, kind = request["repo"], request["revision"], request.get("repo_type", "dataset")
    if request["op"] == "sha":
        return {"sha": api.repo_info(repo, revision=revision, repo_type=kind, timeout=20).sha}
    if request["op"] == "list":
        api.repo_info(repo, revision=revision, repo_type=kind, timeout=20)  # fails at once where listing would retry for minutes
        tree = api.list_repo_tree(repo, revision=revision, repo_type=kind, recursive=True)
        files = [
            {"path": f.path, "size": f.size, "oid": f.blob_id, "sha256": f.lfs.sha256 if f.lfs else None}
            for f in tree
            if hasattr(f, "blob_id")
        ]
        return {"files": files, "readme": _readme(request, api, files)}
    for path in request["paths"]:
        api.hf_hub_download(repo, path, revision=revision, repo_type=kind, local_dir=request["target"])
    return {}


def _readme(request: dict[str, Any], api: Any, files: list[dict[str, Any]]) -> str:
    if not any(f["path"] == "README.md" and f["size"] <= MAX_README_BYTES for f in files):
        return ""
    kind = request.get("repo_type", "dataset")
    path = api.hf_hub_download(
        request["repo"], "README.md", revision=request["revision"], repo_type=kind, local_dir=request["target"], etag_timeout=20
    )
    return Path(path).read_text(encoding="utf-8", errors="replace")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_answer(json.load(sys.stdin))))
