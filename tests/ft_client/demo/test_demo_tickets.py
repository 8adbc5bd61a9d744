"""Claims about the demo's tickets: which rows are held out, and that no training text holds them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ft_client.demo import phrases, tickets

HOLDOUT_SHA256 = "5c720ccd895e585e1bdec0892456d535bc9c0d660b3df383d434046ec2f700cf"


def test_the_held_out_rows_are_the_ones_that_every_figure_was_measured_on() -> None:
    rows = tickets.files()[tickets.HOLDOUT]
    assert hashlib.sha256(rows.encode()).hexdigest() == HOLDOUT_SHA256, "figures of another holdout do not compare with earlier ones"


def test_no_training_ticket_is_written_with_an_unseen_template_or_is_held_out() -> None:
    train, holdout = tickets.make_dataset()
    assert not any(ticket.unseen for ticket in train)
    assert {ticket.text for ticket in train}.isdisjoint(ticket.text for ticket in holdout)
    assert sum(ticket.unseen for ticket in holdout) == tickets.UNSEEN_SHARE * len(holdout)


def test_no_seen_template_is_an_unseen_one() -> None:
    pairs = [(phrases.SEEN, phrases.UNSEEN), (phrases.URGENCY_SEEN, phrases.URGENCY_UNSEEN)]
    for seen, unseen in pairs:
        assert {text for texts in seen.values() for text in texts}.isdisjoint(text for texts in unseen.values() for text in texts)
    assert set(phrases.ORDER_SEEN).isdisjoint(phrases.ORDER_UNSEEN)


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_pages_send_the_adapter_the_system_message_that_it_was_trained_with(page: str) -> None:
    command = (Path(__file__).parents[3] / page).read_text().partition("does not turn on")[2].partition("```")[0]
    assert f'--system "{tickets.SYSTEM_PROMPT}"' in command
