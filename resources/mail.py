"""Plain-text e-mail by SMTP, one connection per message."""

from __future__ import annotations

import smtplib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate
from urllib.parse import unquote, urlsplit

from core.errors import Conflict, Unavailable
from core.storable_text import printable

TIMEOUT_S = 10.0
"""Limit for each exchange with the server."""
WHOLE_TIMEOUT_S = 40.0
"""Limit for the whole conversation: shorter than a delivery's lease, so that a message is not sent twice at once."""
CUT_EVERY_S = 0.1
DEFAULT_PORTS = {"smtp": 587, "smtps": 465}
MAX_ADDRESS_CHARS = 254


@dataclass(frozen=True, kw_only=True, slots=True)
class _Server:
    host: str
    port: int
    user: str
    password: str
    tls_at_once: bool


class SmtpMailer:
    """Sends mail through the server at `url`: ``smtp://user:password@host:587`` or ``smtps://user:password@host:465``.

    With ``smtp``, STARTTLS is used if the server offers it. A password is sent only over TLS. Thread-safe.
    """

    def __init__(
        self,
        *,
        url: str,
        sender: str,
        trust: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        timeout_s: float = TIMEOUT_S,
        whole_timeout_s: float = WHOLE_TIMEOUT_S,
    ) -> None:
        self._server = _parse(url)
        self._sender = sender
        self._trust = trust
        self._timeout_s = timeout_s
        self._whole_timeout_s = whole_timeout_s

    def send(self, *, to: str, subject: str, text: str, message_id: str) -> None:
        """Send a message. Once the server has accepted it, errors in the rest of the conversation are ignored."""
        message = self._message(to, subject, text, message_id)
        try:
            with self._greeted() as server:
                self._introduce(server)
                server.send_message(message, from_addr=self._sender, to_addrs=[to])
                with suppress(smtplib.SMTPException, OSError):
                    server.quit()
        except smtplib.SMTPRecipientsRefused as e:
            code, why = next(iter(e.recipients.values()))
            raise _refused(code, why) from e
        except smtplib.SMTPDataError as e:
            raise _refused(e.smtp_code, e.smtp_error) from e
        except smtplib.SMTPSenderRefused as e:
            raise Unavailable(f"the mail server refused sender {self._sender!r}; check FT_SMTP_FROM", code="mail_unavailable") from e
        except smtplib.SMTPResponseException as e:
            raise Unavailable(_answered(e.smtp_code, e.smtp_error), code="mail_unavailable") from e
        except (smtplib.SMTPException, OSError) as e:
            raise Unavailable(f"the mail server did not answer: {type(e).__name__}", code="mail_unavailable") from e

    def _message(self, to: str, subject: str, text: str, message_id: str) -> EmailMessage:
        """Build the message. The address check and the e-mail policy prevent header injection."""
        if not is_address(to):
            raise Conflict("the member's e-mail address is not valid; correct it", code="mail_refused")
        message = EmailMessage(policy=SMTP)
        message["From"] = self._sender
        message["To"] = to
        message["Subject"] = " ".join(subject.split())
        message["Date"] = formatdate()
        message["Message-ID"] = f"<{message_id}@{self._sender.rpartition('@')[2]}>"
        message["Auto-Submitted"] = "auto-generated"
        message.set_content(text)
        return message

    @contextmanager
    def _greeted(self) -> Iterator[smtplib.SMTP]:
        """Connect and read the server's greeting. The connection is cut after `whole_timeout_s`, and closed at the end."""
        s, deadline = self._server, time.monotonic() + self._whole_timeout_s
        if s.tls_at_once:
            server: smtplib.SMTP = smtplib.SMTP_SSL(s.host, s.port, timeout=self._timeout_s, context=self._trust())
        else:
            server = smtplib.SMTP(s.host, s.port, timeout=self._timeout_s)
        ended = threading.Event()
        threading.Thread(target=_cut_off, args=(server, deadline, ended), daemon=True, name="mail-cut-off").start()
        try:
            yield server
        finally:
            ended.set()
            with suppress(OSError):
                server.close()

    def _introduce(self, server: smtplib.SMTP) -> None:
        s = self._server
        server.ehlo_or_helo_if_needed()
        if not s.tls_at_once and server.has_extn("starttls"):
            server.starttls(context=self._trust())
            server.ehlo()
        elif not s.tls_at_once and s.user:
            raise Unavailable("the mail server does not offer STARTTLS, and the password is only sent over TLS", code="mail_unavailable")
        if s.user:
            server.login(s.user, s.password)


def _cut_off(server: smtplib.SMTP, deadline: float, ended: threading.Event) -> None:
    """Cut the connection at the deadline: each exchange has a limit, but a conversation may have many exchanges.

    Repeats until the conversation has ended, because it may be replacing its socket with a TLS socket at that moment.
    """
    wait_s = max(0.0, deadline - time.monotonic())
    while not ended.wait(wait_s):
        wait_s = CUT_EVERY_S
        if (connection := server.sock) is not None:
            with suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)  # not SSLSocket.shutdown, which another thread may be in


def is_address(text: str) -> bool:
    """Whether `text` is a valid envelope address: a single ``local@domain`` in printable ASCII."""
    local, at, domain = text.rpartition("@")
    plain = text.isascii() and text.isprintable() and not any(c in ' ,;:<>()[]"\\' for c in text)
    return bool(local and at and domain) and plain and "@" not in local and len(text) <= MAX_ADDRESS_CHARS


def _parse(url: str) -> _Server:
    parts = urlsplit(url)
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
        raise ValueError("FT_SMTP_URL is not smtp://user:password@host:587 or smtps://user:password@host:465")
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    if not (user + password).isascii():
        raise ValueError("the user name or password in FT_SMTP_URL contains characters that are not ASCII; set an ASCII one")
    return _Server(
        host=parts.hostname,
        port=parts.port or DEFAULT_PORTS[parts.scheme],
        user=user,
        password=password,
        tls_at_once=parts.scheme == "smtps",
    )


def _refused(code: int, why: bytes | str) -> Unavailable | Conflict:
    """Map a refused recipient or message to an error: 550 to 554 are permanent; others may pass, or are the operator's to fix."""
    if code in (550, 551, 552, 553, 554):
        return Conflict(_answered(code, why), code="mail_refused")
    return Unavailable(_answered(code, why), code="mail_unavailable")


def _answered(code: int, why: bytes | str) -> str:
    text = why.decode(errors="replace") if isinstance(why, bytes) else why
    return f"the mail server answered {code} {printable(' '.join(text.split()))[:200]}"
