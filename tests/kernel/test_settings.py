"""A link's settings as netlink tells them, against the files under /proc/sys, and in another namespace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sealnet.kernel import links, sysctl
from sealnet.kernel.netlink import Netlink, attribute, nested
from tests.lab import Host

pytestmark = pytest.mark.root


def files(link: str) -> dict[str, str]:
    return {key: Path("/proc/sys/net", key.format(link=link)).read_text(encoding="ascii").strip() for key in sysctl.LINK}


def told(name: str, netnsid: int | None = None) -> dict[str, str]:
    with Netlink() as nl:
        link = links.see(nl, name, netnsid=netnsid)
        assert link is not None
        return sysctl.told(link.specific)


@pytest.fixture
def link(host: Host) -> str:
    host.run("ip", "netns", "add", "other")
    host.run("ip", "link", "add", "one", "type", "veth", "peer", "name", "eth0", "netns", "other")
    return "one"


@pytest.mark.parametrize("key", sysctl.LINK)
def test_each_setting_is_told_as_its_file_has_it(host: Host, link: str, key: str) -> None:
    before = files(link)
    path = Path("/proc/sys/net", key.format(link=link))

    path.write_text("1" if before[key] == "0" else "0", encoding="ascii")

    assert files(link)[key] != before[key]
    assert told(link) == files(link)
    host.run("ip", "link", "del", link)
    host.run("ip", "netns", "del", "other")


def test_a_link_of_another_namespace_is_seen_by_that_ones_number(host: Host, link: str) -> None:
    host.run("ip", "netns", "exec", "other", "sysctl", "-qw", "net.ipv4.conf.eth0.accept_local=1")
    fd = os.open("/run/netns/other", os.O_RDONLY | os.O_CLOEXEC)
    host.run("ip", "netns", "add", "stranger")
    strangers = os.open("/run/netns/stranger", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with Netlink() as nl:
            number, none = links.netnsid(nl, fd), links.netnsid(nl, strangers)
            assert number is not None
            assert none is None
            assert links.see(nl, "nothing", netnsid=number) is None
        seen = told("eth0", number)
    finally:
        os.close(fd)
        os.close(strangers)

    key = "ipv4/conf/{link}/accept_local"
    assert seen == {**told(link), key: "1"}
    assert told(link)[key] == "0"
    host.run("ip", "link", "del", link)
    host.run("ip", "netns", "del", "other")
    host.run("ip", "netns", "del", "stranger")


def test_what_is_not_told_is_nothing_that_is_expected() -> None:
    short = nested(2, attribute(1, bytes(4 * 20)))

    for specific in (b"", short, nested(10, attribute(2, b""))):
        seen = sysctl.told(specific)
        assert {key for key, value in seen.items() if value == ""} >= {"ipv4/conf/{link}/route_localnet", "ipv4/conf/{link}/accept_local"}
        assert not any(key.startswith("ipv6/") for key in seen)
