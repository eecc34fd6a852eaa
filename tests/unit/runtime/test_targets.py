"""Which addresses a hub may name, by where it is itself; and that what was checked is what is connected to."""

import ipaddress
import socket
from contextlib import closing
from typing import Any

import pytest

from shoal.runtime import targets
from shoal.runtime.targets import Nearness, Reach, TargetRefused, addresses, check_url, connect, nearness

OF = {
    Nearness.PUBLIC: ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"],
    Nearness.PRIVATE: [
        "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.0.1", "100.64.0.1", "100.127.255.254", "fc00::1",
        "fd12::1", "::ffff:10.0.0.1", "64:ff9b::a00:1",
    ],
    Nearness.LINK_LOCAL: ["169.254.169.254", "fe80::1", "fe80::1%eth0", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe"],
    Nearness.LOOPBACK: ["127.0.0.1", "127.255.255.254", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1"],
    Nearness.SPECIAL: [
        "0.0.0.0", "0.1.2.3", "255.255.255.255", "224.0.0.1", "240.0.0.1", "192.0.2.1", "198.51.100.1", "203.0.113.1",
        "198.18.0.1", "192.0.0.1", "192.88.99.1", "::", "::7f00:1", "ff02::1", "fec0::1", "2001:db8::1", "2001::1",
        "2002:7f00:1::", "3fff::1", "64:ff9b:1::1", "100::1", "::ffff:0.0.0.0", "5f00::1",
        "192.0.0.192", "168.63.129.16",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("address", "near"), [(address, near) for near, of in OF.items() for address in of])
def test_how_near_an_address_is(address: str, near: Nearness) -> None:
    assert nearness(address) is near


@pytest.mark.parametrize(("address", "source", "near"), [
    ("8.8.8.8", "8.8.8.8", Nearness.LOOPBACK), ("8.8.8.8", "8.8.8.9", Nearness.PUBLIC),
    ("8.8.8.8", None, Nearness.PUBLIC), ("2606:4700::1", "2606:4700::1", Nearness.LOOPBACK),
    ("2606:4700::1", "2606:4700:0:0:8000::2", Nearness.PRIVATE), ("2606:4700::1", "2606:4700:0:1::1", Nearness.PUBLIC),
    ("::ffff:8.8.8.8", "8.8.8.8", Nearness.LOOPBACK),
])  # fmt: skip
def test_global_addresses_of_this_machine_and_its_link_are_near(monkeypatch, address, source, near):
    """A firewall that keeps the internet out lets this machine through: to itself, and to what is on its link."""
    monkeypatch.setattr(targets, "_source_of", lambda _: None if source is None else ipaddress.ip_address(source))
    assert nearness(address) is near
    assert targets.nearness_of_hub("http://hub.example", address) is near, "its owner here may name this machine"


MAY_NAME = {
    Nearness.PUBLIC: {Nearness.PUBLIC},
    Nearness.PRIVATE: {Nearness.PRIVATE, Nearness.PUBLIC},
    Nearness.LINK_LOCAL: {Nearness.LINK_LOCAL, Nearness.PRIVATE, Nearness.PUBLIC},
    Nearness.LOOPBACK: {Nearness.LOOPBACK, Nearness.PRIVATE, Nearness.PUBLIC},
}


@pytest.mark.parametrize("hub", MAY_NAME)
def test_reach_by_nearness_of_the_hub(hub: Nearness) -> None:
    assert {target for target in Nearness if Reach(hub).allows(target)} == MAY_NAME[hub]


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f000001", "017700000001", "localhost", "::1"])
def test_loopback_is_recognised_however_it_is_written(host: str) -> None:
    with pytest.raises(TargetRefused, match="is a loopback address, and the hub is at a public one"):
        addresses(host, 80, Reach(Nearness.PUBLIC))


@pytest.mark.parametrize("host", ["127.1", "2130706433", "10.0.0.1", "::ffff:169.254.169.254"])
def test_numbers_are_checked_behind_a_proxy_too(host: str) -> None:
    with pytest.raises(TargetRefused):
        targets.check_behind_proxy(host, 80, Reach(Nearness.PUBLIC))
    targets.check_behind_proxy("relay.example", 80, Reach(Nearness.PUBLIC))  # a name is the proxy's to look up


def test_targets_given_by_the_user_are_not_checked() -> None:
    reach = Reach(Nearness.PUBLIC, frozenset({("127.0.0.1", 80)}))
    assert addresses("127.0.0.1", 80, reach) == ["127.0.0.1"]
    with pytest.raises(TargetRefused):
        addresses("127.0.0.1", 81, reach)


@pytest.mark.parametrize("url", [
    "ftp://8.8.8.8/", "file:///etc/passwd", "http://a:b@8.8.8.8/", "http://a@8.8.8.8", "http://", "http://h:x/", "",
    "http://h:0/", "http://h:65536/", "http://[::1", "http://[v1.a]/", "http://xn--99999/", "http://a b/",
    "http://a..b/", "http://a^b/", "http://b\u00fccher.example/",
])  # fmt: skip
def test_only_plain_urls_are_targets(url: str) -> None:
    with pytest.raises(TargetRefused):
        check_url(url)
    check_url("https://store.example:9000/bucket/object?X-Amz-Signature=0")


def answers(monkeypatch: pytest.MonkeyPatch, *rounds: list[str]) -> None:
    """What the name rebind.example resolves to, each time that it is looked up."""
    known, left = socket.getaddrinfo, list(rounds)

    def resolved(host: str, port: int, *arguments: Any, **options: Any) -> list[Any]:
        if host != "rebind.example":
            return known(host, port, *arguments, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in left.pop(0)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


def pretend_public(monkeypatch: pytest.MonkeyPatch, *public: str) -> None:
    monkeypatch.setattr(targets, "nearness", lambda text: Nearness.PUBLIC if text in public else nearness(text))


@pytest.mark.parametrize(("rounds", "host"), [
    pytest.param([["127.0.0.2"], ["127.0.0.1"]], "0.0.0.0", id="a name that changes its address"),
    pytest.param([["127.0.0.3", "127.0.0.2"]], "127.0.0.2", id="the next address when one does not answer"),
])  # fmt: skip
def test_a_name_is_connected_to_where_it_was_checked(monkeypatch, rounds, host):
    answers(monkeypatch, *rounds)
    pretend_public(monkeypatch, "127.0.0.2", "127.0.0.3")
    with socket.create_server((host, 0)) as server:
        port = server.getsockname()[1]
        with closing(connect("rebind.example", port, 5.0, Reach(Nearness.PUBLIC))) as connection:
            assert connection.getpeername()[0] == "127.0.0.2"


def test_a_name_with_one_near_address_among_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, ["8.8.8.8", "127.0.0.1"])
    with pytest.raises(TargetRefused, match=r"rebind.example \(127.0.0.1\)"):
        addresses("rebind.example", 80, Reach(Nearness.PUBLIC))


def test_where_a_hub_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    assert targets.nearness_of_hub("http://hub.example", "10.0.0.1") is Nearness.PRIVATE, "by the address that answered"
    assert targets.nearness_of_hub("http://10.0.0.1", "8.8.8.8") is Nearness.PUBLIC
    assert targets.nearness_of_hub("http://hub", None) is Nearness.LOOPBACK, "in this process"
    monkeypatch.setenv("HTTP_PROXY", "http://10.0.0.9:3128")
    assert targets.nearness_of_hub("http://hub.example", "10.0.0.9") is Nearness.PUBLIC, "not where the proxy is"
    assert targets.nearness_of_hub("http://10.0.0.1", "10.0.0.9") is Nearness.PRIVATE
