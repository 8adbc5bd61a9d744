"""Personal data and secrets: what is found, what is left alone, and that a redacted text is clean."""

from __future__ import annotations

import csv
import itertools
import json
import pickle
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.checks.pii.accounts import iban_length
from engine.data.checks.pii.scanner import ALL, DETECTORS, Match, PiiScanner, redact
from tests.engine.data.examples_of import shared_file

FAST, PLAIN = PiiScanner(), PiiScanner(use_hyperscan=False)
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\nabc=\n-----END RSA PRIVATE KEY-----"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
ALIVE = {
    "email": ["jane.doe+x@mail.example.co.uk", "joe@x.io", "JOE@EXAMPLE.COM", "o_k-1@a-b.museum"],
    "phone": [
        "+49 30 901820", "+4930901820", "(415) 555-2671", "1-415-555-2671", "415.555.2671", "030/901820 99", "020 7946 0958",
        "06 12 34 56 78",
        "0044 20 7946 0958", "+1 (415) 555-2671", "+44 (0)20 7946 0958", "415\u2013555\u20132671",
        "+33\u00a06\u00a012\u00a034\u00a056\u00a078",
        "123-456-7890", "+14155552671",
    ],
    "card": [
        "4111 1111 1111 1111", "4111111111111111", "5555-5555-5555-4444", "3782 822463 10005", "378282246310005", "6011111111111117",
        "4222222222222", "3530111333300000", "30569309025904", "6212345678901232", "4000000000000000006",
    ],
    "iban": [
        "DE89 3704 0044 0532 0130 00", "DE89370400440532013000", "GB29 NWBK 6016 1331 9268 19", "fr1420041010050500013m02606",
        "NO93 8601 1117 947", "MT84MALT011000012345MTLCAST001S",
    ],
    "ssn": ["078-05-1120", "219-09-9999", "899-12-3456"],
    "ip_address": ["8.8.8.8", "192.168.1.10", "2001:db8::ff00:42:8329", "2001:0db8:85a3:0000:0000:8a2e:0370:7334",
    "fe80::1ff:fe23:4567:890a"],
    "api_key": [
        "sk-proj-abcdefghij_KLMNOPQRST-1234567890", "sk-abcdefghijklmnopqrstuvwx0123456789", "AKIAIOSFODNN7EXAMPLE", "ghp_" + "a1B2" * 9,
        "github_pat_11ABCDEFG0abcdefghijkl_mnop", "xoxb-123456789012-abcdefghij", "AIza" + "a1_B-" * 7,
        "sk_live_" + "4eC39HqLyjWDarjtT1zdp7dc",
        "hf_" + "aB3" * 11, "npm_" + "a1B2" * 9, "glpat-" + "x1-Y2" * 4, JWT,
    ],
    "private_key": [PEM, PEM.replace("\n", "\\n"),
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: x\n\nabc\n-----END PGP PRIVATE KEY BLOCK-----"],
}  # fmt: skip
IN_CONTEXT = [
    ("phone", "my phone number is {}", "4155552671"),
    ("phone", "tel: {}.", "555-0123"),
    ("phone", "Call me at {} tonight", "415 555 2671"),
    ("phone", "whatsapp {}", "91234567"),
    ("ssn", "ssn: {}", "219 09 9999"),
    ("ssn", "Social Security number is {}.", "219099999"),
    ("ip_address", "server: {} is down", "8.8.8.8"),
    ("ip_address", "ip={}", "8.8.4.4"),
    ("ip_address", "http://{}:8080/x", "10.0.0.1"),
    ("card", "card {} exp 12/25 cvv 123", "6011111111111117"),
    ("card", "{} 123 456", "4111 1111 1111 1111"),
    ("iban", "iban {} and 12 more", "GB29NWBK60161331926819"),
    ("api_key", 'api_key = "{}"', "9f86d081884c7d659a2feaa0c55ad015"),
    ("api_key", "AWS_SECRET_ACCESS_KEY={}", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY1"),
    ("api_key", '{{"token": "{}"}}', "Zx81kQp02LmWv7tYbN34"),
    ("private_key", "cut off: {}", "-----BEGIN OPENSSH PRIVATE KEY-----\n" + "b3BlbnNzaC1rZXk" * 5),
    ("email", "mailto:{}?subject=1", "joe@x.io"),
]
HARMLESS = [
    "v1.2.3.4", "version 1.2.3.4", "numpy==1.26.4.0", "127.0.0.1", "0.0.0.0", "255.255.255.0", "239.1.1.1", "1.2.3.4.5", "300.1.1.1",
    "std::vector<int>::iterator", "dead::beef", "12:34:56", "aa:bb:cc:dd:ee:ff", "2001:10:05", "::1",
    "4111 1111 1111 1112", "1234567890123456", "0000 0000 0000 0000", "0.4111111111111111", "a4111111111111111", "1700000000000",
    "000-12-3456", "666-12-3456", "900-12-3456", "123-00-4567", "123-45-0000",
    "icon@2x.png", "git@github.com:a/b.git", "pkg@1.2.3", "@handle.name", "a @ b.com", "joe@localhost",
    "$1,234,567,890", "2023-01-15 10:30:00", "01-02-2023 10", "01.02.2023", "3.14159265358979", "1 000 000 000", "+5 -3 +10000",
    "48/2 = <<48/2=24>>24", "10000000000", "your call at 10:30", "call 12000000 customers", "call 2023-01-15",
    "call me at 10:30 on 01/02/2023",
    "DE89 3704 0044 0532 0130 01", "DE89 3704 0044 0532 0130", "XX89 3704 0044 0532 0130 00",
    "api_key = your_api_key_goes_here", "password = get_password_from_environment()", "token = abcdefghijklmnopqrst",
    "key: 1111111111111111",
    "task-abcdefghijklmnopqrstuvwxyz", "sk-circle-fade-dot-something-long-x", "The header -----BEGIN PRIVATE KEY----- starts it",
    "ISBN 978-3-16-148410-0", "1,234-567-8901", "550e8400-e29b-41d4-a716-446655440000", "order #1234567", "100-200-300", "tel aviv 1234",
    "RFC 2119 and 8259", "52.520008, 13.404954", "12 34 56 78 90", "+1 234", "x+4930901820a", "2023/2024/2025 1234", "+99912345678",
]  # fmt: skip
KNOWN = [(kind, text) for kind, texts in ALIVE.items() for text in texts]
PIECES = (
    [text for _, text in KNOWN]
    + HARMLESS
    + [" ", "", "\n", "1", "-", "a", "@", "(", "[EMAIL]", "phone ", "ssn ", "\u65e5\u672c", "\u00e9", "\U0001f642", "key=", "+", "00"]
)
noise = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=8).map("".join)


def found(text: str, scanner: PiiScanner = FAST) -> list[tuple[str, str]]:
    return [(match.kind, text[match.start : match.end]) for match in scanner.scan([text])[0]]


@pytest.mark.parametrize("scanner", [FAST, PLAIN], ids=["hyperscan", "re"])
def test_each_kind_is_found_whole_whatever_stands_around_it(scanner: PiiScanner) -> None:
    for kind, text in KNOWN:
        for around in ("{}", "It is {}, see.", "({})", "\u65e5\u672c\u8a9e {} \U0001f642", "\u00fc: {}\nnext"):
            assert found(around.format(text), scanner) == [(kind, text)], (kind, around, text)


@pytest.mark.parametrize(("kind", "around", "text"), IN_CONTEXT)
def test_words_before_a_doubtful_number_tell_what_it_is(kind: str, around: str, text: str) -> None:
    assert found(around.format(text)) == found(around.format(text), PLAIN) == [(kind, text)]


@pytest.mark.parametrize("text", HARMLESS)
def test_prices_dates_versions_code_and_placeholders_are_left_alone(text: str) -> None:
    assert found(f"so {text} it is") == found(text) == found(text, PLAIN) == []


@pytest.mark.parametrize(
    ("around", "text"),
    [
        pytest.param("call {} now", "415555267", id="nine digits after a verb"),
        pytest.param("my phone is {}", "5552671", id="seven after a noun"),
        pytest.param("call {} now", "555-2671", id="seven in groups after a verb"),
        pytest.param("in {} we", "021 123 456", id="nine with a trunk prefix"),
        pytest.param("in {} we", "0171 2345 6789", id="twelve with a trunk prefix"),
        pytest.param("in {} we", "+45 12 34 56 78", id="the eight of Denmark after its calling code"),
        pytest.param("in {} we", "+451234567 8", id="the same, the last apart"),
        pytest.param("in {} we", "+4512345678", id="the same in one"),
        pytest.param("in {} we", "+491234567890123", id="fifteen after a calling code"),
    ],
)
def test_the_fewest_and_the_most_digits_of_a_telephone_number(around: str, text: str) -> None:
    assert found(around.format(text)) == found(around.format(text), PLAIN) == [("phone", text)]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("call 41555526 now", id="eight after a verb"),
        pytest.param("my phone is 555267", id="six after a noun"),
        pytest.param("in 021 12 345 we", id="eight with a trunk prefix"),
        pytest.param("in 0171 2345 67890 we", id="thirteen with a trunk prefix"),
        pytest.param("in +45 12 34 5 we", id="seven after a calling code"),
        pytest.param("in +45123456 we", id="eight in one after a calling code"),
        pytest.param("in +45 12 34 56 we", id="six of Denmark's eight"),
        pytest.param("in +451234567 we", id="seven of Denmark's eight"),
        pytest.param("in +441234567890123 we", id="more than a British number has"),
        pytest.param("in +4912345678901234 we", id="sixteen after a calling code"),
    ],
)
def test_a_digit_fewer_or_more_is_no_telephone_number(text: str) -> None:
    assert found(text) == found(text, PLAIN) == []


def test_every_kind_has_examples_here() -> None:
    assert set(ALIVE) == set(ALL) == {d.kind for d in DETECTORS}


def test_a_wrong_check_digit_is_no_card_and_no_iban() -> None:
    for text in (*ALIVE["card"], *ALIVE["iban"]):
        last = text[-1]
        wrong = text[:-1] + (str((int(last) + 1) % 10) if last.isdigit() else "A")
        assert wrong != text and not [f for f in found(wrong) if f[0] in ("card", "iban")], wrong


def test_luhn_accepts_one_last_digit_in_ten() -> None:
    rng = random.Random(0)
    for _ in range(100):
        stem = "4" + "".join(rng.choice("0123456789") for _ in range(rng.choice((11, 14, 17))))
        assert sum(found(f"{stem}{digit}") == [("card", f"{stem}{digit}")] for digit in "0123456789") == 1


def test_the_iban_table_holds_lengths_of_countries() -> None:
    assert [iban_length(country) for country in ("DE", "NO", "MT", "RU", "XX", "US")] == [22, 15, 31, 33, 0, 0]


@settings(max_examples=400, deadline=None)
@given(noise)
def test_hyperscan_and_re_find_the_same(text: str) -> None:
    assert FAST.scan([text]) == PLAIN.scan([text])


@settings(max_examples=300, deadline=None)
@given(noise)
def test_whatever_a_finder_finds_its_gate_lets_through(text: str) -> None:
    for index, detector in enumerate(DETECTORS):
        if any(True for find in detector.finds for _ in find(text)):
            for scanner in (FAST, PLAIN):
                assert index in scanner._gate([text]).get(0, set()), detector.kind


@settings(max_examples=300, deadline=None)
@given(noise)
def test_a_redacted_text_has_nothing_left_to_redact(text: str) -> None:
    clean = redact(text, FAST.scan([text])[0])
    assert FAST.scan([clean]) == [[]]
    assert redact(clean, FAST.scan([clean])[0]) == clean


@settings(max_examples=300, deadline=None)
@given(noise)
def test_matches_are_in_order_and_do_not_overlap(text: str) -> None:
    matches = FAST.scan([text])[0]
    assert all(0 <= m.start < m.end <= len(text) for m in matches)
    assert all(a.end <= b.start for a, b in itertools.pairwise(matches))


def test_a_number_with_a_checksum_is_not_taken_for_a_telephone_number() -> None:
    assert found("phone 4111 1111 1111 1111") == [("card", "4111 1111 1111 1111")]
    assert found("call DE89 3704 0044 0532 0130 00") == [("iban", "DE89 3704 0044 0532 0130 00")]


def test_redaction_names_the_kind_and_keeps_the_rest() -> None:
    text = "\u00dcber joe@x.io und +49 30 901820: sk-abcdefghijklmnopqrstuvwx0123456789!"
    assert redact(text, FAST.scan([text])[0]) == "\u00dcber [EMAIL] und [PHONE]: [API_KEY]!"
    assert redact(text, []) == text


def test_a_batch_gives_each_text_its_own_matches() -> None:
    texts = ["nothing", "joe@x.io", "", "a\nb", "8.8.8.8 and ann@y.org"]
    assert FAST.scan(texts) == [FAST.scan([text])[0] for text in texts]
    assert [len(matches) for matches in FAST.scan(texts)] == [0, 1, 0, 0, 2]
    assert FAST.scan([]) == []


def test_only_the_kinds_asked_for_are_looked_for() -> None:
    scanner = PiiScanner(["phone", "email"])
    assert scanner.kinds == ("email", "phone")
    assert found("joe@x.io 8.8.8.8 +49 30 901820", scanner) == [("email", "joe@x.io"), ("phone", "+49 30 901820")]
    with pytest.raises(ValueError, match="'fax' is not one of: private_key"):
        PiiScanner(["fax"])  # type: ignore[list-item]


def test_a_scanner_travels_to_another_process() -> None:
    scanner = pickle.loads(pickle.dumps(PiiScanner(["email"], use_hyperscan=False)))
    assert scanner.kinds == ("email",) and not scanner.use_hyperscan
    assert scanner.scan(["joe@x.io"]) == [[Match("email", 0, 8)]]


def test_half_a_surrogate_pair_is_no_obstacle() -> None:
    assert found("\ud83d joe@x.io") == [("email", "joe@x.io")]


@pytest.mark.parametrize("name", ["banking77_train.csv", "gsm8k_train.jsonl", "gsm8k_test.jsonl"])
def test_real_questions_full_of_prices_and_dates_raise_no_false_alarm(name: str) -> None:
    path = shared_file(name)
    with path.open(encoding="utf-8") as lines:
        texts = (
            [row["text"] for row in csv.DictReader(lines)]
            if name.endswith("csv")
            else ["\n".join(json.loads(line).values()) for line in lines]
        )
    assert len(texts) > 1000 and sum(any(c.isdigit() for c in text) for text in texts) > 100
    assert [(i, matches) for i, matches in enumerate(FAST.scan(texts)) if matches] == []


@pytest.mark.parametrize("piece", [
    "1 ", "1", "+1", "00 1", "a@", "@a.", "joe@x.io ", "-----BEGIN PRIVATE KEY-----", "-eyJ", ".eyJaaaaaaaa", "key=", "key=a1",
    "1.", "fe80:", "tel ",
    "tel  is ", "ssn ", "AB12", "AB12 ", "(0", "4111 ", "+1.1,", "0" * 99 + " ", " " * 99, "+49 30 901820\n",
])  # fmt: skip
@pytest.mark.parametrize("scanner", [FAST, PLAIN], ids=["hyperscan", "re"])
def test_a_text_made_to_be_slow_is_scanned_in_linear_time(piece: str, scanner: PiiScanner) -> None:
    text = piece * (100_000 // len(piece)) + "x"
    start = time.process_time()
    scanner.scan([text])
    assert time.process_time() - start < 3.0  # a quadratic search of 100,000 characters takes minutes
