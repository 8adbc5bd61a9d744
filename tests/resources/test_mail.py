"""E-mail through a real SMTP server."""

from __future__ import annotations

import smtplib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, Envelope, LoginPassword, Session

from core.errors import Conflict, Unavailable
from resources.mail import SmtpMailer, is_address
from tests.support.servers.certificates import contexts

SENDER = "ft@ft.example.com"


class Mailbox:
    """Takes every message but those for two recipients."""

    def __init__(self) -> None:
        self.taken: list[tuple[list[str], Message]] = []
        self.tls: list[bool] = []
        self.farewell = "221 Bye"

    async def handle_RCPT(self, server: Any, session: Session, envelope: Envelope, address: str, options: list[str]) -> str:  # noqa: N802
        if address.startswith("nobody"):
            return "550 5.1.1 no such mailbox"
        if address.startswith("full"):
            return "452 4.2.2 mailbox full"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Session, envelope: Envelope) -> str:  # noqa: N802
        assert isinstance(envelope.content, bytes)
        self.tls.append(session.ssl is not None)
        if envelope.rcpt_tos[0].startswith("strict"):
            return "554 5.7.1 no such messages"
        self.taken.append((list(envelope.rcpt_tos), message_from_bytes(envelope.content)))
        return "250 OK"

    async def handle_QUIT(self, server: Any, session: Session, envelope: Envelope) -> str:  # noqa: N802
        return self.farewell


class Listening(Controller):
    """Its port is known once it listens."""

    def _trigger_server(self) -> None:
        assert self.server is not None
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()


Start = Callable[..., tuple[Mailbox, int]]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[Controller] = []

    def run(**options: Any) -> tuple[Mailbox, int]:
        box = Mailbox()
        controller = Listening(box, hostname="127.0.0.1", port=0, **options)
        controller.start()
        running.append(controller)
        return box, controller.port

    yield run
    for controller in running:
        controller.stop()


def send(mailer: SmtpMailer, to: str = "ada@example.com", subject: str = "Job ftjob-1 has failed") -> None:
    mailer.send(to=to, subject=subject, text="Look at it.\nThen go on.\n", message_id="dlv_1")


def test_a_message_arrives_with_what_mail_programs_need(start: Start) -> None:
    box, port = start()
    send(SmtpMailer(url=f"smtp://127.0.0.1:{port}", sender=SENDER))
    ((to, message),) = box.taken
    assert to == ["ada@example.com"]
    assert (message["From"], message["To"], message["Subject"]) == (SENDER, "ada@example.com", "Job ftjob-1 has failed")
    assert message["Message-ID"] == "<dlv_1@ft.example.com>" and message["Date"] and message["Auto-Submitted"] == "auto-generated"
    assert message.get_payload(decode=True) == b"Look at it.\r\nThen go on.\r\n"


def test_a_login_goes_over_starttls(start: Start, tmp_path: Path) -> None:
    server, trust = contexts(tmp_path, host="localhost")

    def authenticate(_: Any, session: Session, envelope: Envelope, mechanism: str, data: Any) -> AuthResult:
        assert isinstance(data, LoginPassword)
        return AuthResult(success=(data.login, data.password) == (b"ft", b"p@ss:word"), handled=False)

    box, port = start(tls_context=server, authenticator=authenticate, auth_required=True)
    send(SmtpMailer(url=f"smtp://ft:p%40ss%3Aword@localhost:{port}", sender=SENDER, trust=lambda: trust))
    assert box.tls == [True]
    with pytest.raises(Unavailable, match="535"):
        send(SmtpMailer(url=f"smtp://ft:wrong@localhost:{port}", sender=SENDER, trust=lambda: trust))
    with pytest.raises(Unavailable):
        send(SmtpMailer(url=f"smtp://ft:p%40ss%3Aword@localhost:{port}", sender=SENDER))  # its certificate is nobody's we know
    assert len(box.taken) == 1


def test_a_password_is_sent_over_nothing_less_than_tls(start: Start) -> None:
    box, port = start()
    with pytest.raises(Unavailable, match="only sent over TLS"):
        send(SmtpMailer(url=f"smtp://ft:secret@127.0.0.1:{port}", sender=SENDER))
    assert box.taken == []


@pytest.mark.parametrize("farewell", ["554 not so fast", "250 OK", "what?"])
def test_a_message_that_was_taken_is_sent_however_the_server_takes_its_leave(start: Start, farewell: str) -> None:
    box, port = start()
    box.farewell = farewell
    send(SmtpMailer(url=f"smtp://127.0.0.1:{port}", sender=SENDER))
    assert len(box.taken) == 1


@contextmanager
def scripted(greeting: str, answers: Mapping[str, str]) -> Iterator[int]:
    """A server that says `greeting`, and of `answers` what fits a command, on one connection; an answer without an end goes on."""
    ended = threading.Event()

    def talk() -> None:
        connection, _ = listening.accept()
        with connection, connection.makefile("rwb", buffering=0) as stream, suppress(OSError):
            stream.write(greeting.encode())
            while line := stream.readline():
                answer = answers.get(line[:4].decode().strip().upper(), "250 OK\r\n").encode()
                stream.write(answer)
                while answer.startswith(b"250-") and not ended.wait(0.02):
                    stream.write(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            ended.set()
            thread.join(timeout=60)


NO = "554 5.7.1 go away\r\n"


@pytest.mark.parametrize(("greeting", "answers"), [(NO, {}), ("220 here\r\n", {"EHLO": NO, "HELO": NO}), ("220 here\r\n", {"MAIL": NO})])
def test_a_server_that_refuses_us_is_tried_again(greeting: str, answers: dict[str, str]) -> None:
    with scripted(greeting, answers) as port, pytest.raises(Unavailable):
        send(SmtpMailer(url=f"smtp://127.0.0.1:{port}", sender=SENDER))


def test_a_server_that_always_has_more_to_say_is_left_in_time() -> None:
    with scripted("220 here\r\n", {"EHLO": "250-MORE\r\n"}) as port, pytest.raises(Unavailable):
        send(SmtpMailer(url=f"smtp://127.0.0.1:{port}", sender=SENDER, whole_timeout_s=0.2))


@pytest.mark.parametrize(
    ("to", "error"), [("nobody@example.com", Conflict), ("strict@example.com", Conflict), ("full@example.com", Unavailable)]
)
def test_a_mailbox_that_is_full_is_tried_again_and_one_that_is_none_is_not(start: Start, to: str, error: type[Exception]) -> None:
    _, port = start()
    with pytest.raises(error):
        send(SmtpMailer(url=f"smtp://127.0.0.1:{port}", sender=SENDER), to)


def test_a_server_that_is_away_is_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Unavailable):
        send(SmtpMailer(url=f"smtp://127.0.0.1:{port}", sender=SENDER))
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unavailable):
        send(SmtpMailer(url=f"smtp://127.0.0.1:{silent.getsockname()[1]}", sender=SENDER, timeout_s=0.2))


@pytest.mark.parametrize(
    "to",
    [
        "a@b.c\r\nBcc: x@y.z",
        "a@b.c\nRCPT TO:<x@y.z>",
        "a@b.c, x@y.z",
        "<a@b.c>",
        "a b@c.d",
        "a@b@c.d",
        "@b.c",
        "a@",
        "\u00e4@b.c",
        "a@b.c\0",
    ],
)
def test_an_address_that_could_say_more_than_an_address_is_not_sent_to(start: Start, to: str) -> None:
    box, port = start()
    assert not is_address(to)
    with pytest.raises(Conflict):
        send(SmtpMailer(url=f"smtp://127.0.0.1:{port}", sender=SENDER), to)
    assert box.taken == []


def test_a_subject_makes_no_header(start: Start) -> None:
    box, port = start()
    send(SmtpMailer(url=f"smtp://127.0.0.1:{port}", sender=SENDER), subject="done\r\nBcc: x@y.z\r\n\r\nhello")
    ((to, message),) = box.taken
    assert to == ["ada@example.com"] and message["Bcc"] is None
    assert message["Subject"] == "done Bcc: x@y.z hello"


def test_an_address_of_a_server_that_is_none_is_refused_at_once() -> None:
    for url in ("http://mail", "smtp://", "mail.example.com:25"):
        with pytest.raises(ValueError, match="FT_SMTP_URL"):
            SmtpMailer(url=url, sender=SENDER)
    with pytest.raises(ValueError, match="ASCII"):
        SmtpMailer(url="smtp://ft:gr%C3%BCn@mail", sender=SENDER)


def test_tls_at_once_is_spoken_where_the_url_says_so(start: Start, tmp_path: Path) -> None:
    server, trust = contexts(tmp_path, host="localhost")
    box, port = start(ssl_context=server)
    send(SmtpMailer(url=f"smtps://localhost:{port}", sender=SENDER, trust=lambda: trust))
    assert len(box.taken) == 1
    with pytest.raises((Unavailable, ssl.SSLError, smtplib.SMTPException)):
        send(SmtpMailer(url=f"smtps://localhost:{port}", sender=SENDER))
