"""The only process that talks to a Hugging Face Hub: a request as JSON on stdin, the response as JSON on stdout.

It runs separately because huggingface_hub reads its environment once, on import: the platform is offline by default, and only the endpoint
that its operator has set may be contacted. The token is part of the request, never of arguments or a file; without one, a token on the
machine is not used.

    sha        -> sha
    list       -> files, readme
    download   -> nothing: the paths are in the target directory
    any        -> error, detail
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from core.errors import IntegrityError
from core.typed_json import from_json
from engine.data.readers.hub import hub_session

MAX_README_BYTES = 1 << 20
"""Bytes of a dataset card; only its front matter is read."""
MEMORY_BYTES = 2 << 30
"""Of address space of the process: five times what it takes, and what a listing without an end would."""
LEAST_FILE_BYTES = 1 << 20
"""What the library's own small files may have beside a download."""
TIMEOUT_S = 6 * 3600.0
"""Seconds for a download: 10 GB at half a megabyte per second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubRequest:
    op: Literal["sha", "list", "download"]
    repo: str
    revision: str
    endpoint: str
    token: str | None
    repo_type: Literal["dataset", "model"] = "dataset"
    paths: tuple[str, ...] = ()
    """Files to download."""
    sizes: tuple[int, ...] = ()
    """Bytes of each, beyond which no download goes on."""
    target: str = ""
    """Directory for downloads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedFile:
    path: str
    size: int
    oid: str
    """Git's hash of the file; of a large file, of its pointer."""
    sha256: str | None
    """Of a large file."""

    def verify(self, download: Path, *, repo: str) -> None:
        """Refuses and deletes a download that differs from the commit: by sha256 for large files, by git's own hash for the others."""
        size = download.stat().st_size
        digest = hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        with download.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
        if size != self.size or digest.hexdigest() != (self.sha256 or self.oid):
            download.unlink()
            raise IntegrityError(f"{self.path} of {repo} arrived with {size} bytes that are not those of the commit; fetch it again")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubAnswer:
    sha: str | None = None
    files: tuple[ListedFile, ...] = ()
    readme: str = ""
    error: Literal["absent", "gated", "revision", "unreachable"] | None = None
    detail: str = ""


def ask_hub(request: HubRequest, *, home: Path, timeout_s: float = TIMEOUT_S) -> HubAnswer:
    """Returns the response of a client process to `request`; `home` receives the library's own files."""
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING_FACE", "TRANSFORMERS_"))},
        "HF_HOME": str(home),
        "HF_ENDPOINT": request.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    command = [sys.executable, "-m", "engine.data.readers.hub.hub_client"]
    try:
        done = subprocess.run(
            command, input=json.dumps(asdict(request)), capture_output=True, text=True, env=environment, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return HubAnswer(error="unreachable", detail=f"no answer within {timeout_s:.0f} s")
    try:
        return from_json(HubAnswer, json.loads(done.stdout))
    except json.JSONDecodeError:
        return HubAnswer(error="unreachable", detail=(done.stderr.strip() or f"the client ended with code {done.returncode}")[-300:])


def _answer(request: HubRequest) -> HubAnswer:
    import huggingface_hub as hub
    from huggingface_hub import errors

    hub_session.restrict_hub_session(request.endpoint)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    try:
        return _do(request, hub.HfApi(endpoint=request.endpoint, token=request.token or False))
    except errors.GatedRepoError as error:
        return HubAnswer(error="gated", detail=_first_line(error))
    except errors.RepositoryNotFoundError as error:
        return HubAnswer(error="absent", detail=_first_line(error))
    except errors.LocalEntryNotFoundError as error:  # no response, and no local copy
        return HubAnswer(error="unreachable", detail=_first_line(error))
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        return HubAnswer(error="revision", detail=_first_line(error))
    except errors.HFValidationError as error:
        return HubAnswer(error="absent", detail=_first_line(error))
    except Exception as error:  # the network, the disk or the library may raise anything: the caller words it
        return HubAnswer(error="unreachable", detail=f"{type(error).__name__}: {_first_line(error)}")


def _do(request: HubRequest, api: Any) -> HubAnswer:
    repo, revision, kind = request.repo, request.revision, request.repo_type
    if request.op == "sha":
        return HubAnswer(sha=api.repo_info(repo, revision=revision, repo_type=kind, timeout=20).sha)
    if request.op == "list":
        api.repo_info(repo, revision=revision, repo_type=kind, timeout=20)  # fails at once where listing would retry for minutes
        tree = api.list_repo_tree(repo, revision=revision, repo_type=kind, recursive=True)
        files = tuple(
            ListedFile(path=f.path, size=f.size, oid=f.blob_id, sha256=f.lfs.sha256 if f.lfs else None)
            for f in tree
            if hasattr(f, "blob_id")
        )
        return HubAnswer(files=files, readme=_readme(request, api, files))
    for path, size in zip(request.paths, request.sizes, strict=True):
        _limit(resource.RLIMIT_FSIZE, max(size, LEAST_FILE_BYTES))  # writing on raises OSError
        api.hf_hub_download(repo, path, revision=revision, repo_type=kind, local_dir=request.target)
    return HubAnswer()


def _readme(request: HubRequest, api: Any, files: tuple[ListedFile, ...]) -> str:
    if not any(f.path == "README.md" and f.size <= MAX_README_BYTES for f in files):
        return ""
    _limit(resource.RLIMIT_FSIZE, MAX_README_BYTES)
    path = api.hf_hub_download(
        request.repo, "README.md", revision=request.revision, repo_type=request.repo_type, local_dir=request.target, etag_timeout=20
    )
    return Path(path).read_text(encoding="utf-8", errors="replace")


def _limit(kind: int, most: int) -> None:
    """Let this process, which does what a Hub answers, take no more of it."""
    resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_answer(from_json(HubRequest, json.load(sys.stdin))))))
