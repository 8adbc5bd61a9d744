"""Stores the reference log-probabilities that a training has computed, for other jobs and for its own next attempt elsewhere."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

from agent.api_client import Fenced
from agent.objects import Objects
from core.durable_files import sha256_of, write_json
from core.errors import FtError
from core.retries import RetryPolicy, with_retries

MANIFEST = "manifest.json"
RETRIES = RetryPolicy(give_up_s=600.0)
END_S = 30.0
"""How long the end of the training waits for them."""

log = logging.getLogger(__name__)


class ReferenceUpload:
    """A thread that stores the files in `directory` once its manifest is there. Training depends on nothing of it.

    The files go below the workload's name and the manifest is replaced last, so that two jobs that compute the same ones do not mix them.
    """

    def __init__(self, objects: Objects, directory: Path, *, prefix: str, workload: str) -> None:
        self._objects, self._directory, self._prefix, self._workload = objects, directory, prefix, workload
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin if there is something to store now."""
        if self._thread is None and self._prefix and (self._directory / MANIFEST).is_file():
            self._thread = threading.Thread(target=self._run, name="reference", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait a little for what is being stored."""
        if self._thread is not None:
            self._thread.join(END_S)

    def _run(self) -> None:
        try:
            with_retries(self._store, RETRIES)
        except (FtError, OSError, Fenced) as error:
            log.warning("the reference log-probabilities are not stored, and will be computed again: %s", error)

    def _store(self) -> None:
        body = json.loads((self._directory / MANIFEST).read_text())
        for entry in body["files"]:
            path, entry["name"] = self._directory / entry["name"], f"{self._workload}/{entry['name']}"
            if sha256_of(path) != entry["sha256"]:
                raise OSError(f"{path} is damaged on this node")
            self._objects.store(f"{self._prefix}/{entry['name']}", path, None)
        stored = self._directory / f".stored-{MANIFEST}"
        write_json(stored, body)
        self._objects.store(f"{self._prefix}/{MANIFEST}", stored, None)
