"""Verdicts of a judge or a guard model, kept beside the report while its evaluation is reviewed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from control_plane.platform.protocols import ObjectStore


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptVerdicts:
    """Objects named after their content, which hold verdicts by key; two reviews at a time do not disturb each other."""

    objects: ObjectStore
    prefix: str

    def read(self) -> dict[str, Mapping[str, Any]]:
        """Return every verdict that was kept."""
        found: dict[str, Mapping[str, Any]] = {}
        for info in self.objects.list(self.prefix):
            found |= json.loads(self.objects.get_bytes(info.key))
        return found

    def keep(self, verdicts: Mapping[str, Mapping[str, Any]]) -> None:
        """Store `verdicts`; they survive a crash once this has returned."""
        data = json.dumps(verdicts, sort_keys=True).encode()
        self.objects.put_bytes(f"{self.prefix}/{hashlib.sha256(data).hexdigest()}", data)
