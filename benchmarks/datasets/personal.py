"""Invented personal data with valid check digits: a scanner that verifies them must find these too."""

from __future__ import annotations

import random
import string

IBAN_LENGTHS = {"DE": 18, "GB": 18, "ES": 20}
"""Characters after country and check digits; for GB the first four are letters."""


def card(r: random.Random) -> str:
    digits = [4, *(r.randrange(10) for _ in range(14))]
    total = sum(d if i % 2 else (2 * d - 9 if d > 4 else 2 * d) for i, d in enumerate(reversed(digits)))
    number = "".join(map(str, [*digits, -total % 10]))
    return " ".join(number[i : i + 4] for i in range(0, 16, 4)) if r.random() < 0.7 else number


def iban(r: random.Random) -> str:
    country = r.choice(sorted(IBAN_LENGTHS))
    body = "".join(r.choices(string.digits, k=IBAN_LENGTHS[country]))
    if country == "GB":
        body = "".join(r.choices(string.ascii_uppercase, k=4)) + body[4:]
    spelled = "".join(str(int(c, 36)) for c in f"{body}{country}00")
    return f"{country}{98 - int(spelled) % 97:02}{body}"


def personal(r: random.Random) -> tuple[str, str]:
    """A kind and a value of that kind."""
    kind = r.choice(("email", "phone", "card", "iban", "ssn", "ip", "key"))
    if kind == "email":
        return kind, f"{r.choice('abcdefgh')}.smith{r.randrange(999)}@example{r.randrange(99)}.com"
    if kind == "phone":
        return kind, f"+1 ({r.randrange(201, 990)}) {r.randrange(200, 999)}-{r.randrange(1000, 9999)}"
    if kind == "card":
        return kind, card(r)
    if kind == "iban":
        return kind, iban(r)
    if kind == "ssn":
        return kind, f"{r.randrange(100, 665)}-{r.randrange(10, 99)}-{r.randrange(1000, 9999)}"
    if kind == "ip":
        return kind, f"{r.randrange(11, 223)}.{r.randrange(256)}.{r.randrange(256)}.{r.randrange(1, 255)}"
    return kind, "sk-" + "".join(r.choices(string.ascii_letters + string.digits, k=48))
