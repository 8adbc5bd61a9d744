"""A workload by value: what runs, on which inputs and GPUs, and where it reports. It contains no path, so it can start on any machine."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from core.typed_json import from_json

VARIABLE = "FT_WORKLOAD"
"""Environment variable of the agent: the file with its workload as JSON."""
TOKEN_FILE = "FT_TOKEN_FILE"
"""Environment variable of the agent: the file with its attempt's token."""
NODE = "FT_NODE"
"""Environment variable of the agent: the number of its node in the gang. The agent of node 0 leads."""
NODE_DIR = "FT_NODE_DIR"
"""Environment variable of the agent: the node's directory, which outlives the workload: cached inputs, and checkpoints of its jobs."""


class Kind(enum.StrEnum):
    TRAIN = "train"
    EVALUATE = "evaluate"
    EXPORT = "export"


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    path: str
    """Relative path inside its input."""
    key: str
    """Object key."""
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """A directory of objects, such as a pack or a base model."""

    name: str
    """Field of the run file that gets its directory: ``base_model_dir``, ``pack_dir``, ..."""
    files: tuple[InputFile, ...]
    """Those that are there before the process starts."""
    later: tuple[InputFile, ...] = ()
    """Shards of a pack that may arrive while it runs."""
    optional: bool = False
    """The process makes it itself if it is missing or damaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """A file that the workload leaves, and that its agent stores."""

    path: str
    """Relative path inside the job's directory on the node."""
    key: str
    """Object key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCheckpoint:
    """A committed checkpoint that the workload may resume from."""

    step: int
    attempt: int
    prefix: str
    manifest_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeShare:
    """The part of a reservation on one node."""

    node: str
    devices: tuple[int, ...]
    """Numbers of its GPUs on the machine that runs it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One gang of processes with a deterministic name; a name is used once."""

    name: str
    """``<job>-a<attempt>``."""
    kind: Kind
    command: tuple[str, ...] = ("agent",)
    """What the launcher starts on each node: a Python module and its arguments."""
    tenant: str
    job: str
    attempt: int = 0
    module: str = ""
    """Python module that the agent runs, a training under torchrun; its only argument is the run file."""
    processes: tuple[int, ...] = (1,)
    """Ranks on each node of the gang, in the order of `placement`. Each node has an agent; rank 0 is on the first one."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Content of the run file, except for the directories, which are the agent's."""
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    """None for a training, which stores checkpoints."""
    checkpoints: tuple[StoredCheckpoint, ...] = ()
    """Newest first."""
    checkpoint_prefix: str = ""
    """Object prefix under which the attempt may write checkpoints."""
    final_prefix: str = ""
    """Object prefix under which it may write the finished model."""
    reference_prefix: str = ""
    """Object prefix under which it may write reference log-probabilities; empty if its method needs none."""
    report_to: str = ""
    """URL of the control plane's API, as the workload reaches it."""
    placement: tuple[NodeShare, ...] = ()
    image: str = ""
    """Container image by digest; ``local`` for a process of this checkout."""
    grace_s: float = 30.0
    """Seconds between SIGTERM and SIGKILL; a checkpoint is promised within 25."""
    heartbeat_timeout_s: float = 30.0
    """Seconds without a sign of life after which the training process counts as hung."""
    labels: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    """Additional environment; never a secret."""

    @property
    def num_nodes(self) -> int:
        return len(self.processes)

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(number for share in self.placement for number in share.devices)

    def devices_of(self, node: int) -> tuple[int, ...]:
        """Return the GPUs of one node of the gang."""
        return self.devices if self.num_nodes == 1 else self.placement[node].devices

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return from_json(cls, json.loads(text))
