"""What the runs of one worker share: the host in any thread, and links that are deleted together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sealnet.errors import KernelRefused
from sealnet.kernel import links
from sealnet.kernel.netlink import Netlink
from sealnet.records import State
from sealnet.worker.shared import SharedHost
from tests.lab import Host

pytestmark = pytest.mark.root


@pytest.fixture
def shared(host: Host) -> Iterator[SharedHost]:
    state = State(host.state)
    state.prepare()
    made = SharedHost(state.path, state.tag)
    yield made
    made.close()


def add(host: Host, *names: str) -> list[tuple[int, str]]:
    for name in names:
        host.run("ip", "link", "add", name, "group", "7", "type", "veth", "peer", "name", f"{name}p", "group", "7")
    with Netlink() as nl:
        return [(link.ifindex, link.name) for link in links.see_all(nl) if link.name in names]


def there(host: Host) -> set[str]:
    with Netlink() as nl:
        return {link.name for link in links.see_all(nl)}


def test_links_that_go_together_are_gone_and_no_other(host: Host) -> None:
    before = there(host)
    found = add(host, "one", "two", "three")
    (stranger,) = add(host, "stranger")
    host.run("ip", "link", "del", "two")

    with Netlink() as nl:
        links.remove_together(nl, found)
        links.remove_together(nl, found)

    assert there(host) == before | {"stranger", "strangerp"}
    with Netlink() as nl:
        links.remove_together(nl, [stranger])


def test_each_thread_has_sockets_of_its_own(shared: SharedHost) -> None:
    found: list[Any] = [shared.netlink]
    thread = threading.Thread(target=lambda: found.append(shared.netlink))
    thread.start()
    thread.join()

    assert found[0] is shared.netlink
    assert found[1] is not found[0]
    with pytest.raises(AttributeError):
        shared.nothing  # noqa: B018


@pytest.mark.parametrize("refuses", [False, True])
def test_many_who_delete_at_once_find_their_links_gone(
    host: Host, shared: SharedHost, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    before = there(host)
    found = add(host, *(f"link{number}" for number in range(12)))
    together: list[int] = []
    real = links.remove_together

    def remove(nl: Netlink, batch: Any) -> None:
        together.append(len(batch))
        if refuses:
            raise KernelRefused("cannot remove links: somebody is in the way", errno=16)
        real(nl, batch)

    monkeypatch.setattr(links, "remove_together", remove)
    gone: list[bool] = []

    def delete(index: int, name: str) -> None:
        shared.delete_link(index, name)
        gone.append(name not in there(host))

    with shared._deleting:
        # They are all there before the first may.
        deleting = [threading.Thread(target=delete, args=one) for one in found]
        for thread in deleting:
            thread.start()
        while len(shared._wanted) < len(found):
            pass
    for thread in deleting:
        thread.join()

    assert gone == [True] * len(found)
    # Whoever came first has taken them all along; those who could not go with the others have gone alone.
    assert max(together) == len(found)
    assert len(together) == 1 or refuses
    assert there(host) == before


def test_a_link_that_is_gone_has_no_address(host: Host) -> None:
    """Who looks at all links one by one finds some of them gone: other runs end meanwhile."""
    [(index, name)] = add(host, "gone0")
    host.run("ip", "addr", "add", "192.0.2.1/24", "dev", name)

    with Netlink() as nl:
        before = links.see_addresses(nl, index)
        host.run("ip", "link", "del", name)
        after = links.see_addresses(nl, index)

    assert before == ["192.0.2.1/24"]
    assert after == []
