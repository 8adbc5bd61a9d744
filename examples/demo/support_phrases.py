"""Customers' phrases for the base model's corpus only, read from ``support_phrases.yaml``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

_FOUND: Final[dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

TOPIC_PHRASES: Final[Mapping[str, Sequence[str]]] = _FOUND["topic_phrases"]
TOPIC_THINGS: Final[Mapping[str, Sequence[str]]] = _FOUND["topic_things"]
THING_CARRIERS: Final[Sequence[str]] = _FOUND["thing_carriers"]
URGENCY_PHRASES: Final[Mapping[str, Sequence[str]]] = _FOUND["urgency_phrases"]
ORDER_PHRASES: Final[Sequence[str]] = _FOUND["order_phrases"]
ASIDES: Final[Sequence[str]] = _FOUND["asides"]
