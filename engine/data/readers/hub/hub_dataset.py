"""A dataset on a Hugging Face Hub as input: its id, which pins a commit, and the file made from its split.

    hf://ORG/NAME@COMMIT                    the split ``train``
    hf://ORG/NAME@COMMIT:validation         another split
    hf://ORG/NAME@COMMIT/CONFIG:test        of one configuration
    hf://ORG/NAME@COMMIT/data/some.jsonl    one file
    hf://datasets/...                       the same, as written by the Hub's own tools

COMMIT is a full commit hash: a branch moves, and with it the data that a job was trained on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from core.errors import FtError, InvalidDataset, InvalidRequest, NotFound, Unavailable
from engine.data.readers.containers import MAX_DECODED_BYTES
from engine.data.readers.hub.hub_client import TIMEOUT_S, HubAnswer, HubRequest, ask_hub
from engine.data.readers.hub.hub_files import DATA_FILE, pick
from engine.data.readers.hub.shards import join_shards

COMMIT = re.compile(r"[0-9a-f]{40}")
SHAPE = re.compile(
    r"hf://(?:datasets/(?P<any>[\w.-]+(?:/[\w.-]+)?)|(?P<full>[\w.-]+/[\w.-]+))"
    r"(?:@(?P<revision>[^/:@]+))?(?:/(?P<rest>[^:@]+?))?/?(?::(?P<split>[\w.-]+))?",
    re.ASCII,
)
LOOK_S = 60.0
"""Seconds that the Hub has to list a repository."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubId:
    repo: str
    """``ORG/NAME``."""
    revision: str
    """40 hexadecimal digits."""
    config: str | None = None
    path: str | None = None
    """One file of the repository, instead of a configuration."""
    split: str = "train"

    def __str__(self) -> str:
        rest = self.path or self.config
        split = "" if self.path else f":{self.split}"
        return f"hf://datasets/{self.repo}@{self.revision}{'/' + rest if rest else ''}{split}"


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFile:
    hub_id: HubId
    path: Path
    """One file with every row of the split: its only file, or its shards in order; rows are numbered continuously."""
    filename: str
    sources: tuple[str, ...]
    """Files of the repository that it was made of."""
    num_bytes: int
    """Bytes of the sources, as stored on the Hub."""


def parse_hub_id(text: str, *, endpoint: str | None = None, token: str | None = None, scratch: Path | None = None) -> HubId:
    """Parses an id. One without a commit is refused; with `endpoint` and `scratch`, the refusal names the current one."""
    match = SHAPE.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"{text[:200]!r} is not an id of the form hf://ORG/NAME@COMMIT[/CONFIG][:SPLIT]", code="invalid_hub_id")
    repo, revision, rest = match["any"] or match["full"], match["revision"], match["rest"]
    if any(part in ("", ".", "..") for part in (*repo.split("/"), *(rest or "x").split("/"))):
        raise InvalidRequest(f"{text[:200]!r} names no file or folder", code="invalid_hub_id")
    if revision is None or not COMMIT.fullmatch(revision.lower()):
        raise _unpinned(repo, revision or "main", endpoint=endpoint, token=token, scratch=scratch)
    is_file = rest is not None and DATA_FILE.search(rest) is not None
    if is_file and match["split"]:
        raise InvalidRequest(
            f"{text[:200]!r} names a file and a split; a file is one split, leave out :{match['split']}", code="invalid_hub_id"
        )
    return HubId(
        repo=repo,
        revision=revision.lower(),
        config=None if is_file else rest,
        path=rest if is_file else None,
        split=match["split"] or "train",
    )


def _unpinned(repo: str, revision: str, *, endpoint: str | None, token: str | None, scratch: Path | None) -> InvalidRequest:
    message = f"{revision!r} of {repo} is not a commit: it can change while a job uses it"
    fix = f"write hf://{repo}@ and the 40 digits of a commit (see its page under 'Files and versions', 'History')"
    if endpoint and scratch is not None:
        request = HubRequest(op="sha", repo=repo, revision=revision, endpoint=endpoint.rstrip("/"), token=token)
        if (sha := ask_hub(request, home=scratch, timeout_s=LOOK_S).sha) and COMMIT.fullmatch(sha):
            fix = f"it is {sha} now; write hf://{repo}@{sha}"
    return InvalidRequest(f"{message}; {fix}", code="hub_revision_not_pinned")


def fetch_from_hub(
    hub_id: HubId, target_dir: Path, *, endpoint: str | None, token: str | None = None, max_bytes: int = MAX_DECODED_BYTES
) -> HubFile:
    """Downloads the split that `hub_id` names into `target_dir` and joins its shards. Files downloaded before are reused.

    Every byte is checked against the hashes that the commit records. `max_bytes`: limit on the stored files.
    """
    if not endpoint:
        raise InvalidRequest(f"{hub_id} cannot be read: no Hub is set up for this platform; upload the file instead", code="hub_disabled")
    raw = target_dir / "hub"
    raw.mkdir(parents=True, exist_ok=True)
    request = HubRequest(op="list", repo=hub_id.repo, revision=hub_id.revision, endpoint=endpoint.rstrip("/"), token=token, target=str(raw))
    listing = _send(request, hub_id, raw, timeout_s=LOOK_S)
    files = {file.path: file for file in listing.files}
    sources = pick(sorted(files), listing.readme, config=hub_id.config, path=hub_id.path, split=hub_id.split)
    if any(".." in Path(p).parts or Path(p).is_absolute() for p in sources):
        raise InvalidRequest(f"{hub_id} contains a path outside the repository", code="invalid_hub_id")
    num_bytes = sum(files[p].size for p in sources)
    if any(files[p].size < 0 for p in sources):
        raise InvalidRequest(f"{hub_id} lists a file with a size below 0; name another one", code="invalid_hub_id")
    if num_bytes > max_bytes:
        raise InvalidDataset(f"{hub_id} holds {num_bytes} bytes, more than {max_bytes}; name one of its files", code="file_too_large")
    sizes = tuple(files[source].size for source in sources)
    _send(replace(request, op="download", paths=tuple(sources), sizes=sizes), hub_id, raw, timeout_s=TIMEOUT_S)
    for source in sources:
        files[source].verify(raw / source, repo=hub_id.repo)
    path = join_shards([raw / source for source in sources], target_dir / "joined", max_bytes=max_bytes)
    name = sources[0].rsplit("/", 1)[-1]
    filename = name if len(sources) == 1 else f"{hub_id.split}{''.join(path.suffixes)}"
    return HubFile(hub_id=hub_id, path=path, filename=filename, sources=tuple(sources), num_bytes=num_bytes)


def _send(request: HubRequest, hub_id: HubId, home: Path, *, timeout_s: float) -> HubAnswer:
    answer = ask_hub(request, home=home / ".home", timeout_s=timeout_s)
    if answer.error:
        raise _refusal(answer.error, answer.detail, hub_id, request.endpoint, bool(request.token))
    return answer


def _refusal(kind: str, detail: str, hub_id: HubId, endpoint: str, has_token: bool) -> FtError:
    repo = f"dataset {hub_id.repo}"
    give = "the token that was given may not read it" if has_token else "if it is private, give a token that may read it"
    if kind == "gated":
        page = f"{endpoint}/datasets/{hub_id.repo}"
        need = give if has_token else "give the token of an account that has"
        return InvalidRequest(f"{repo} is gated: accept its terms at {page}; {need}", code="hub_dataset_gated")
    if kind == "absent":
        return NotFound(f"{repo} is not on {endpoint}; {give}", code="hub_dataset_not_found")
    if kind == "revision":
        return NotFound(f"{repo} has no commit {hub_id.revision}; see its history for one that it has", code="hub_revision_not_found")
    return Unavailable(f"{endpoint} did not give {hub_id} ({detail}); try again later", code="hub_unavailable")
