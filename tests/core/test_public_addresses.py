"""Where webhooks may be sent."""

from __future__ import annotations

import ipaddress

import pytest

from core.errors import InvalidRequest
from core.public_addresses import is_public, parse, parse_networks, permitted

INNER = {
    "this machine": "127.0.0.1", "all of 127/8": "127.8.9.1", "nothing in particular": "0.0.0.0", "private 10/8": "10.1.2.3",
    "private 172.16/12": "172.31.255.1", "private 192.168/16": "192.168.0.1", "metadata of clouds": "169.254.169.254",
    "carrier-grade NAT": "100.64.0.1", "multicast": "224.0.0.1", "multicast that is called global": "233.252.0.1",
    "broadcast": "255.255.255.255", "benchmarks": "198.18.0.1", "documentation": "203.0.113.5", "relays of 6to4": "192.88.99.1",
    "reserved": "240.0.0.1", "this machine, IPv6": "::1", "nothing, IPv6": "::", "link-local": "fe80::1", "unique local": "fd00::1",
    "metadata, IPv6": "fd00:ec2::254", "site-local": "fec0::1", "multicast, IPv6": "ff02::1", "a mapped inner address": "::ffff:10.0.0.1",
    "mapped metadata": "::ffff:169.254.169.254", "an IPv4 address in IPv6": "::127.0.0.1", "NAT64 of an inner address": "64:ff9b::a00:1",
    "NAT64 of metadata": "64:ff9b::a9fe:a9fe", "a local NAT64": "64:ff9b:1::1", "6to4 of this machine": "2002:7f00:1::1",
    "6to4 of anything": "2002:808:808::1", "Teredo": "2001:0:4136:e378::1", "documentation, IPv6": "2001:db8::1",
    "new documentation, IPv6": "3fff::1", "discard": "100::1", "outside of what is given out": "4000::1",
}  # fmt: skip


@pytest.mark.parametrize("address", INNER.values(), ids=INNER.keys())
def test_an_address_that_is_not_plainly_public_is_refused(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    with pytest.raises(InvalidRequest, match="public addresses alone"):
        permitted(parse("https://hooks.example.com/"), [address], allowed=())


SPECIAL = [
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24", "192.0.0.0/29",
    "192.0.0.8/32", "192.0.0.9/32", "192.0.0.10/32", "192.0.0.170/31", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24",
    "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4",
    "255.255.255.255/32", "::1/128", "::/128", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "2001::/32",
    "2001:1::1/128", "2001:1::2/128", "2001:1::3/128", "2001:2::/48", "2001:3::/32", "2001:4:112::/48", "2001:10::/28", "2001:20::/28",
    "2001:30::/28", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10",
]  # fmt: skip
"""IANA's IPv4 and IPv6 special-purpose address registries, without the forms that embed an IPv4 address."""


@pytest.mark.parametrize("network", SPECIAL)
def test_special_purpose_addresses_are_not_public(network: str) -> None:
    block = ipaddress.ip_network(network)
    assert [a for a in (block[0], block[block.num_addresses // 2], block[-1]) if is_public(a)] == []


@pytest.mark.parametrize("address", ["192.0.1.1", "192.31.195.255", "192.31.197.0", "192.175.49.1", "2620:4f:8001::1"])
def test_neighbours_of_special_purpose_addresses_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_a_public_address_is_allowed(address: str) -> None:
    assert permitted(parse("https://hooks.example.com/"), [address], allowed=()) == [ipaddress.ip_address(address)]


def test_one_inner_address_refuses_a_name_that_also_has_public_ones() -> None:
    with pytest.raises(InvalidRequest):
        permitted(parse("https://hooks.example.com/"), ["8.8.8.8", "10.0.0.1"], allowed=())
    with pytest.raises(InvalidRequest):
        permitted(parse("https://hooks.example.com/"), [], allowed=())


def test_what_the_operator_allows_is_reached_by_http_and_at_any_port_and_nothing_else_is() -> None:
    allowed = parse_networks("10.1.0.0/16, fd00::/8")
    assert permitted(parse("http://hooks.svc:25/"), ["10.1.2.3", "fd00::1"], allowed=allowed)
    with pytest.raises(InvalidRequest):
        permitted(parse("http://hooks.svc:25/"), ["10.2.2.3"], allowed=allowed)
    with pytest.raises(InvalidRequest, match="scheme is not https"):
        permitted(parse("http://hooks.example.com/"), ["10.1.2.3", "8.8.8.8"], allowed=allowed)


@pytest.mark.parametrize("port", [22, 25, 80, 1023])
def test_a_well_known_port_other_than_https_is_refused(port: int) -> None:
    with pytest.raises(InvalidRequest, match=f"port {port}"):
        permitted(parse(f"https://hooks.example.com:{port}/"), ["8.8.8.8"], allowed=())
    assert permitted(parse("https://hooks.example.com:8443/"), ["8.8.8.8"], allowed=())


REFUSED_URLS = {
    "another scheme": "ftp://x.com/", "no scheme": "x.com/hook", "no host": "https:///hook", "a user": "https://user@x.com/",
    "a password": "https://u:p@x.com/", "what looks like a host": "https://x.com\\@127.0.0.1/", "a fragment": "https://x.com/#a",
    "a line break": "https://x.com/\r\nX-Evil: 1", "a blank": "https://x.com/a b", "a NUL": "https://x.com/\0", "port 0": "https://x.com:0/",
    "a port that is none": "https://x.com:99999/", "half an address": "https://[::1/", "3,000 characters": "https://x.com/" + "a" * 3000,
    "a file": "file:///etc/passwd", "nothing": "",
}  # fmt: skip


@pytest.mark.parametrize("url", REFUSED_URLS.values(), ids=REFUSED_URLS.keys())
def test_a_url_that_is_unclear_or_says_too_much_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(url)
    assert (refused.value.code, refused.value.param) == ("invalid_webhook_url", "url")


def test_a_url_is_taken_apart_once_and_sent_as_it_was_read() -> None:
    target = parse("https://M\u00fcnchen.example:8443/a?b=1")
    assert (target.host, target.port, target.path) == ("xn--mnchen-3ya.example", 8443, b"/a?b=1")
    assert target.host_header == b"xn--mnchen-3ya.example:8443"
    assert parse("https://[2001:4860:4860::8888]/").host == "2001:4860:4860::8888"
