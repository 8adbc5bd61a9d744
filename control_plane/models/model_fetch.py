"""Fetches a base model from a Hugging Face Hub: the weights, tokenizer and config of one commit, once.

Fetches nothing that could run code: no pickles, no Python. An interrupted transfer resumes; a file counts only with the size and hash that
the commit records, and the directory only if all of its files do.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

import httpx
from filelock import FileLock

from core.base_models import PICKLE_SUFFIXES
from core.errors import FtError, InvalidRequest, NotFound, Unavailable
from engine.data import HubAnswer, HubRequest, ListedFile, ask_hub, guard_hub_session

COMMIT = re.compile(r"[0-9a-f]{40}")
REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
NEEDED = ("config.json", "tokenizer.json")
WANTED = (
    *NEEDED, "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "LICENSE", "LICENSE.txt", "LICENSE.md",
)  # fmt: skip
INDEX = "model.safetensors.index.json"
COMPLETE = ".fetched.json"
"""Written when all files of a directory have arrived."""
LICENSE = re.compile(r"^license:[ \t]*['\"]?([\w.+-]+)", re.M)
LOOK_S = 60.0
"""Time limit for the Hub to list a repository."""
TIMEOUT = httpx.Timeout(60.0, connect=20.0)
NUM_TRIES = 5
"""Retries after an interrupted transfer, or if the Hub is busy."""
PAUSE_S = 1.0
"""Pause before the second try; doubled before each further one."""
BUSY = (408, 429)
"""Statuses that may change later, like those from 500 on; every other refusal is final."""
CHUNK = 1 << 20

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    directory: Path
    license: str | None
    """As in the model card."""
    num_bytes: int
    """Bytes transferred now: 0 if the files existed."""


def fetch_model(
    repo: str, revision: str, models_dir: Path, *, endpoint: str, token: str | None = None, say: Say = lambda _: None,
    wait: Callable[[float], None] = time.sleep,
) -> Fetched:  # fmt: skip
    """Return the model's directory below `models_dir`; concurrent callers wait for the fetch in progress."""
    _check_request(repo, revision, endpoint)
    target = models_dir / f"{repo.replace('/', '--')}@{revision[:12]}"
    models_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(models_dir / f".{target.name}.lock"):
        done = target / COMPLETE
        if done.is_file():
            return Fetched(directory=target, license=json.loads(done.read_text())["license"], num_bytes=0)
        shutil.rmtree(target, ignore_errors=True)  # left by a removal that was interrupted
        partial = models_dir / f".{target.name}.partial"
        partial.mkdir(exist_ok=True)
        listing = _listing(repo, revision, endpoint, token, partial)
        files = {file.path: file for file in listing.files}
        hub = _Hub(endpoint=endpoint, repo=repo, revision=revision, token=token, directory=partial, say=say, wait=wait)
        num_bytes = sum(hub.fetch(files[name]) for name in _names(files, hub))
        found = LICENSE.search(listing.readme)
        shutil.rmtree(partial / ".home", ignore_errors=True)
        (partial / "README.md").unlink(missing_ok=True)
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        record = {"repo": repo, "revision": revision, "license": found[1] if found else None}
        (partial / COMPLETE).write_text(json.dumps(record))
        partial.rename(target)
    return Fetched(directory=target, license=record["license"], num_bytes=num_bytes)


def remove_fetched(directory: Path) -> None:
    """Delete a fetched directory; what an interrupted call leaves is not taken for a complete one."""
    (directory / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _check_request(repo: str, revision: str, endpoint: str) -> None:
    if not endpoint:
        raise InvalidRequest(f"{repo} cannot be fetched: no Hub is set up; set FT_HUB_ENDPOINT, or use --path DIR", code="hub_disabled")
    if not REPO.fullmatch(repo):
        raise InvalidRequest(f"{repo[:120]!r} is not a repository name of the form ORG/NAME", code="invalid_hub_id", param="repo")
    if ".." in repo or "--" in repo:
        raise InvalidRequest(f"{repo[:120]!r} is not a repository name: it contains '..' or '--'", code="invalid_hub_id", param="repo")
    if not COMMIT.fullmatch(revision):
        raise InvalidRequest(
            f"{revision[:60]!r} of {repo} is not a commit: a branch can move, and the model with it; give the 40 hex digits of a commit",
            code="hub_revision_not_pinned",
            param="revision",
        )


def _listing(repo: str, revision: str, endpoint: str, token: str | None, scratch: Path) -> HubAnswer:
    request = HubRequest(op="list", repo_type="model", repo=repo, revision=revision, endpoint=endpoint, token=token, target=str(scratch))
    answer = ask_hub(request, home=scratch / ".home", timeout_s=LOOK_S)
    if answer.error:
        raise _refusal(answer.error, answer.detail, repo, revision, endpoint)
    return answer


def _refusal(kind: str, detail: str, repo: str, revision: str, endpoint: str) -> FtError:
    if kind == "gated":
        return InvalidRequest(
            f"{repo} is gated: accept its terms at {endpoint}/{repo}, and set FT_HUB_TOKEN to a token of that account",
            code="hub_model_gated",
        )
    if kind == "absent":
        return NotFound(
            f"{repo} is not on {endpoint}; if it is private, set FT_HUB_TOKEN to a token that may read it", code="hub_model_not_found"
        )
    if kind == "revision":
        return NotFound(f"{repo} has no commit {revision}; see its history for one that it has", code="hub_revision_not_found")
    return Unavailable(f"{endpoint} did not return {repo} ({detail}); run the command again to resume", code="hub_unavailable")


def _names(files: Mapping[str, ListedFile], hub: _Hub) -> Sequence[str]:
    """Return the files to fetch: the weights that the index names, or the only weight file, then the files beside them."""
    if missing := [name for name in NEEDED if name not in files]:
        raise InvalidRequest(f"{hub.repo} holds no {' and no '.join(missing)}, which training and serving need", code="hub_model_unusable")
    if INDEX in files:
        hub.fetch(files[INDEX])
        weights = sorted(set(json.loads((hub.directory / INDEX).read_text())["weight_map"].values()))
    else:
        weights = [name for name in files if re.fullmatch(r"model[\w.-]*\.safetensors", name)]
    if absent := [name for name in weights if name not in files or "/" in name or not name.endswith(".safetensors")]:
        raise InvalidRequest(
            f"the index of {hub.repo} names {absent[0]!r}, which is not one of its weight files", code="hub_model_unusable"
        )
    if not weights:
        pickled = [name for name in files if name.endswith(PICKLE_SUFFIXES)]
        raise InvalidRequest(
            f"{hub.repo} has no safetensors{f' (only {pickled[0]})' if pickled else ''}; pickles can run code and are never fetched",
            code="unsafe_weights",
        )
    return [*(name for name in WANTED if name in files), *weights]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hub:
    endpoint: str
    repo: str
    revision: str
    token: str | None
    directory: Path
    say: Say
    wait: Callable[[float], None]

    def fetch(self, listed: ListedFile) -> int:
        """Fetch and verify one file; returns the bytes transferred."""
        name, size = listed.path, listed.size
        path, part = self.directory / name, self.directory / f"{name}.part"
        if path.is_file():
            return 0
        start = part.stat().st_size if part.is_file() else 0
        if start:
            self.say(f"{name} resumes at {start} of {size} bytes")
        elif size > CHUNK:
            self.say(f"fetching {name}, {size / 1e9:.2f} GB")
        url = f"{self.endpoint}/{self.repo}/resolve/{self.revision}/{quote(name)}"
        for tried in range(1, NUM_TRIES + 1):
            try:
                self._transfer(url, part, size)
                break
            except (httpx.TransportError, Unavailable) as error:
                if tried == NUM_TRIES:
                    raise _refusal("unreachable", f"{name}: {error}", self.repo, self.revision, self.endpoint) from error
                self.wait(PAUSE_S * 2 ** (tried - 1))
        listed.verify(part, repo=self.repo)
        part.rename(path)
        return size - start

    def _transfer(self, url: str, part: Path, size: int) -> None:
        start = part.stat().st_size if part.is_file() else 0
        if start > size:
            part.unlink()
            start = 0
        if start == size and part.is_file():
            return
        headers = {"range": f"bytes={start}-"} if start else {}
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"  # not forwarded to another host that the Hub redirects to
        headers["accept-encoding"] = "identity"
        hooks = {"request": [guard_hub_session(self.endpoint)]}
        with (
            httpx.Client(timeout=TIMEOUT, follow_redirects=True, event_hooks=hooks) as http,
            http.stream("GET", url, headers=headers) as answer,
        ):
            if answer.status_code not in (200, 206):
                self._refuse(answer.status_code, part.name.removesuffix(".part"))
            with part.open("ab" if answer.status_code == 206 else "wb") as out:
                for chunk in answer.iter_raw():  # written as it arrives, so that an interrupted transfer keeps what it has
                    out.write(chunk)
                    if out.tell() > size:  # it is refused below: its rest could fill the disk
                        break
        if part.stat().st_size < size:
            raise Unavailable(f"the transfer broke off at {part.stat().st_size} of {size} bytes")

    def _refuse(self, status: int, name: str) -> NoReturn:
        """Raise ``Unavailable`` if a retry may help, otherwise an error with the operator's next step."""
        if status in (401, 403):
            raise _refusal("gated", "", self.repo, self.revision, self.endpoint)
        if status in (404, 410):
            message = (
                f"{self.endpoint} lists {name} in {self.repo}, but no longer has it; check whether the repository was changed or deleted"
            )
            raise NotFound(message, code="hub_model_not_found")
        if status < 500 and status not in BUSY:
            raise InvalidRequest(f"{self.endpoint} refuses {name} of {self.repo} with status {status}", code="hub_model_unusable")
        raise Unavailable(f"status {status}")
