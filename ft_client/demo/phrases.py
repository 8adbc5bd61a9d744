"""The words of the ticket task, read from ``phrases.yaml``: what a customer may say, and which label each phrase stands for.

Three kinds of phrases, kept apart because the claim "unseen template" rests on it:

* ``SEEN``: in the training tickets, and in the text that the base model was pre-trained on;
* ``UNSEEN``: only in holdout tickets, in no training text of any kind;
* phrases that only the base model sees live in ``examples/demo``.

``[a|b]`` picks one of the alternatives, ``{p}`` is the product as the customer calls it, ``{o}`` the order number,
``{d}`` a day, ``{n}`` a small number, ``{a}`` an amount of money, ``{name}`` and ``{city}`` what they say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

Texts = tuple[str, ...]


def _texts(name: str) -> Texts:
    return tuple(_READ[name])


def _by_label(name: str) -> dict[str, Texts]:
    return {label: tuple(texts) for label, texts in _READ[name].items()}


_READ: Final[dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PRODUCTS, SEEN, UNSEEN, URGENCY_SEEN, URGENCY_UNSEEN = map(_by_label, ("products", "seen", "unseen", "urgency_seen", "urgency_unseen"))
"""By label."""
CATEGORIES, PRIORITIES, ORDER_SEEN, ORDER_UNSEEN = map(_texts, ("categories", "priorities", "order_seen", "order_unseen"))
FILLERS, GREETINGS, CLOSINGS = map(_texts, ("fillers", "greetings", "closings"))
NAMES, CITIES, MONTHS, DAYS = map(_texts, ("names", "cities", "months", "days"))
