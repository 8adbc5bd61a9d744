"""Where webhooks may be sent: which URLs an endpoint may have, and which addresses a connection may be made to.

A tenant chooses the URL, and the platform's network stands behind the sender: so the address that a connection goes to is
checked, not the name, and every address that the name stands for. What is not plainly public is refused.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import httpx

from core.errors import InvalidRequest

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_URL_CHARS = 2048
HTTPS_PORT = 443
FIRST_UNPRIVILEGED_PORT = 1024
"""Of the ports below only HTTPS' own: no mail server or shell is knocked at in a tenant's name."""

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
REFUSED: Sequence[Network] = [
    ipaddress.ip_network(n)
    for n in (
        "192.0.0.0/24",  # protocols' own, two anycast addresses among them
        "192.31.196.0/24",  # AS112: answers for private addresses
        "192.52.193.0/24",  # AMT relays
        "192.88.99.0/24",  # relays of 6to4
        "192.175.48.0/24",  # AS112
        "2001::/23",  # Teredo and other protocols' own
        "2002::/16",  # 6to4: an IPv4 address inside, whichever
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
]
"""Global by their prefix, and no server of anybody's: with what Python calls not global, IANA's registries of special-purpose addresses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A URL, taken apart once: what is checked is what is connected to."""

    scheme: str
    host: str
    """As DNS has it (punycode), or an address without brackets."""
    port: int
    path: bytes
    """With the query."""
    host_header: bytes


def parse(url: str) -> Target:
    """Take an endpoint's URL apart; ``InvalidRequest`` says what is wrong with it. Addresses are not looked at here."""
    if len(url) > MAX_URL_CHARS:
        raise _refused(f"it has {len(url)} characters, at most {MAX_URL_CHARS} are allowed")
    if any(ord(c) <= 32 or ord(c) == 127 for c in url):
        raise _refused("it holds a blank or a control character")
    try:
        parsed = httpx.URL(url)
        host, port = parsed.raw_host.decode("ascii"), parsed.port
    except (httpx.InvalidURL, ValueError, UnicodeError) as e:
        raise _refused("it is not a URL") from e
    if parsed.scheme not in ("https", "http"):
        raise _refused("its scheme is not https")
    if not host:
        raise _refused("it names no host")
    if parsed.userinfo:
        raise _refused("it holds a user name or password; receivers check the signature instead")
    if parsed.fragment:
        raise _refused("it has a fragment (#...), which is never sent; leave it out")
    default = HTTPS_PORT if parsed.scheme == "https" else 80
    if port is not None and not 1 <= port <= 65535:
        raise _refused(f"port {port} is outside 1..65535")
    return Target(
        scheme=parsed.scheme, host=host.strip("[]"), port=port or default, path=parsed.raw_path, host_header=parsed.netloc
    )  # fmt: skip


def permitted(target: Target, addresses: Iterable[str], *, allowed: Sequence[Network]) -> list[Address]:
    """The addresses to connect to; ``InvalidRequest`` unless every one may be sent to.

    1. An address in one of the operator's `allowed` networks may be, by http too and at any port.
    2. Any other must be public, by https, at port 443 or one from 1024 up.
    3. One address that may not be refuses them all: a name that stands for an inner and an outer one is no public receiver.
    """
    found = [ipaddress.ip_address(a.partition("%")[0]) for a in addresses]
    inside = [any(a in n for n in allowed) for a in found]
    if not found or not all(ok or is_public(a) for a, ok in zip(found, inside, strict=True)):
        raise _refused(f"host {target.host[:255]!r} does not stand for public addresses alone")
    if all(inside):
        return found
    if target.scheme != "https":
        raise _refused("its scheme is not https")
    if target.port != HTTPS_PORT and target.port < FIRST_UNPRIVILEGED_PORT:
        raise _refused(f"port {target.port} is neither {HTTPS_PORT} nor {FIRST_UNPRIVILEGED_PORT} or above")
    return found


def is_public(address: Address) -> bool:
    """Whether `address` is one of the public internet, and not one that wraps or stands for something else."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address in NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in GLOBAL_UNICAST:
            return False
    return address.is_global and not address.is_multicast and not any(address in n for n in REFUSED)


def parse_networks(text: str) -> tuple[Network, ...]:
    """Networks of a comma-separated list of CIDRs."""
    return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip())


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"the URL cannot receive webhooks: {why}; give one like https://hooks.example.com/ft", code="invalid_webhook_url", param="url"
    )
