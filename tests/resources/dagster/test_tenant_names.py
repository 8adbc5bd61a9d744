"""What counts as naming a tenant in Dagster's texts: a tenant's id may be any word, or the beginning of another tenant's."""

from __future__ import annotations

import pytest

from resources.dagster.dagster_records import Names

JOB, ANOTHER = f"ftjob-{'a' * 24}", f"ftjob-{'b' * 24}"
NAMES = Names(tenant="free", ids=frozenset({JOB}))


@pytest.mark.parametrize("text", [
    '{"ft/tenant": "free", "dagster/ft_tier": "standard"}', '{\\"tenant\\": \\"free\\"}', f"free:{ANOTHER}", f'["free:{ANOTHER}"]',
    f"free:ds_{'c' * 24}",
    f"file:///objects/tenants/free/jobs/{ANOTHER}/final", f"{JOB}#2", f"/work/jobs/{JOB}/metrics.jsonl",
])  # fmt: skip
def test_a_text_that_names_the_tenant_is_found_and_overwritten(text: str) -> None:
    assert NAMES.within(text)
    assert not NAMES.within(NAMES.overwritten(text))


@pytest.mark.parametrize("text", [
    '{"ft/tenant": "acme", "dagster/ft_tier": "free"}', "0 of 48 GPUs are free", f"free-2:{ANOTHER}", f"be-free:{ANOTHER}",
    f"acme:ds_{'c' * 24}",
    f"tenants/free-2/jobs/{ANOTHER}", f"{ANOTHER}#2",
])  # fmt: skip
def test_an_ordinary_word_and_another_tenant_are_left_alone(text: str) -> None:
    assert not NAMES.within(text)
    assert NAMES.overwritten(text) == text
