"""What the runs of one worker share: the host in any thread, and links that are deleted together."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import pytest

from sealnet.errors import KernelRefused, SealnetError
from sealnet.kernel import links, sockets
from sealnet.kernel.gate import Gate
from sealnet.kernel.netlink import Netlink
from sealnet.kernel.nft import Nft
from sealnet.model.plan import Seal
from sealnet.records import State
from sealnet.worker.shared import SharedHost
from sealnet.worker.together import Together
from tests.lab import Host, wait_for

pytestmark = pytest.mark.root


@pytest.fixture
def shared(host: Host) -> Iterator[SharedHost]:
    state = State(host.state)
    state.prepare()
    made = SharedHost(state.path, state.tag)
    yield made
    made.close()


@contextlib.contextmanager
def somebody_at_it(together: Together[Any, Any]) -> Iterator[None]:
    """Whoever comes meanwhile waits."""
    with together._lock:
        together._is_busy = True
    try:
        yield
    finally:
        together._hand_on([])


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


def test_whose_turn_it_is_has_the_turns_own_sockets_and_only_then(host: Host, shared: SharedHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every thread that was ever next would keep a libnftables of its own."""
    found = add(host, *(f"link{number}" for number in range(6)))
    used: list[tuple[Netlink, int]] = []
    real = links.remove

    def remove(nl: Netlink, index: int, name: str) -> None:
        used.append((nl, threading.get_ident()))
        real(nl, index, name)

    monkeypatch.setattr(links, "remove", remove)
    own: list[Netlink] = []

    def delete(index: int, name: str) -> None:
        before = shared.netlink
        shared.delete_link(index, name)
        assert shared.netlink is before
        own.append(before)

    for one in found:
        thread = threading.Thread(target=delete, args=one)
        thread.start()
        thread.join()

    assert len(used) == len(own) == 6
    assert len({id(nl) for nl, _thread in used}) == 1
    assert not {id(nl) for nl, _thread in used} & {id(nl) for nl in own}


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

    with somebody_at_it(shared._deleting):
        # They are all there before the first may.
        deleting = [threading.Thread(target=delete, args=one) for one in found]
        for thread in deleting:
            thread.start()
        wait_for(lambda: len(shared._deleting._waiting) == len(found), what="all of them wait")
    for thread in deleting:
        thread.join()

    assert gone == [True] * len(found)
    # Whoever came first has taken them all along; those who could not go with the others have gone alone.
    assert max(together) == len(found)
    assert len(together) == 1 or refuses
    assert there(host) == before


def test_who_has_been_served_does_not_wait_for_who_comes_next() -> None:
    """Else each of those that end together would wait for the grace periods of all of them."""
    began, go_on = threading.Event(), threading.Event()
    batches: list[list[str]] = []

    def do(batch: Sequence[str]) -> list[str]:
        batches.append(list(batch))
        if "a" in batch:
            wait_for(lambda: len(many._waiting) == 1, what="one has come meanwhile")
        if "later" in batch:
            began.set()
            assert go_on.wait(60)
        return [word.upper() for word in batch]

    many = Together(alone=lambda word: do([word])[0], together=do)
    told: list[str] = []

    def ask(word: str) -> threading.Thread:
        thread = threading.Thread(target=lambda: told.append(many.do(word)))
        thread.start()
        return thread

    with somebody_at_it(many):
        first = [ask(word) for word in ("a", "b", "c")]
        wait_for(lambda: len(many._waiting) == 3, what="three wait")
    wait_for(lambda: len(batches) == 1, what="they are served")
    later = ask("later")
    for thread in first:
        thread.join(60)
    assert sorted(told)[:3] == ["A", "B", "C"]
    assert began.wait(60)
    assert told.count("LATER") == 0
    last = [ask(word) for word in ("d", "e")]
    wait_for(lambda: len(many._waiting) == 2, what="two more wait")
    go_on.set()
    for thread in (later, *last):
        thread.join(60)

    assert sorted(told) == ["A", "B", "C", "D", "E", "LATER"]
    assert sorted(map(sorted, batches)) == [["a", "b", "c"], ["d", "e"], ["later"]]


def test_one_who_fails_keeps_nobody_from_being_next() -> None:
    def fail(_: object) -> Any:
        raise ZeroDivisionError

    failing: Together[str, str] = Together(alone=fail, together=fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing.do("a")


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


# Leases and connections

MANY = [Seal(run_id=f"many-{number}", subnet=IPv4Network(f"198.18.0.{4 * number}/30"), lease_port=8080) for number in range(6)]


def together(shared: SharedHost, part: Together[Any, Any], calls: list[Callable[[], Any]]) -> list[Any]:
    """What each of the calls has answered, or raised, when all of them have come before the first may."""
    answers: list[Any] = [None] * len(calls)

    def call(at: int) -> None:
        try:
            answers[at] = calls[at]()
        except SealnetError as error:
            answers[at] = error

    with somebody_at_it(part):
        threads = [threading.Thread(target=call, args=(at,)) for at in range(len(calls))]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(part._waiting) == len(calls), what="all of them wait")
    for thread in threads:
        thread.join()
    return answers


@pytest.fixture
def transactions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    real = Nft.apply

    def apply(self: Nft, text: str, what: str) -> None:
        found.append(what)
        real(self, text, what)

    monkeypatch.setattr(Nft, "apply", apply)
    return found


def test_leases_are_granted_and_withdrawn_in_one_transaction(host: Host, shared: SharedHost, transactions: list[str]) -> None:
    shared.add_gate()
    transactions.clear()

    granted = together(shared, shared._granting, [partial(shared.grant, of, ttl_s=90) for of in MANY])
    held = [(shared.has_lease(of), shared.has_gateway(of)) for of in MANY]
    withdrawn = together(shared, shared._revoking, [partial(shared.revoke, of) for of in MANY[1:]])

    assert granted == [False] * len(MANY)
    assert held == [(True, True)] * len(MANY)
    assert withdrawn == [None] * len(MANY[1:])
    assert transactions == [f"grant the leases of {len(MANY)} runs", f"remove the leases of {len(MANY) - 1} links"]
    assert [(shared.has_lease(of), shared.has_gateway(of)) for of in MANY] == [(True, True)] + [(False, False)] * len(MANY[1:])
    shared.revoke(MANY[0])
    assert not shared.has_lease(MANY[0])
    # What is gone already keeps nobody's from going.
    shared.grant(MANY[2], ttl_s=90)
    together(shared, shared._revoking, [partial(shared.revoke, of) for of in MANY])
    assert not any(shared.has_lease(of) or shared.has_gateway(of) for of in MANY)


def test_a_lost_gate_is_put_back_by_whoever_grants_next(host: Host, shared: SharedHost) -> None:
    granted = together(shared, shared._granting, [partial(shared.grant, of, ttl_s=90) for of in MANY])

    # Whoever has found it gone tells so.
    assert set(granted) <= {True, False}
    assert any(granted)
    assert all(shared.has_lease(of) for of in MANY)
    host.run("nft", "delete", "table", "inet", "sealnet")
    assert together(shared, shared._revoking, [partial(shared.revoke, of) for of in MANY]) == [None] * len(MANY)
    shared.add_gate()


def test_a_lease_goes_also_from_a_gate_that_lacks_the_rest(host: Host, shared: SharedHost) -> None:
    shared.add_gate()
    for of in MANY:
        shared.grant(of, ttl_s=600)
    leases = host.run("nft", "list", "set", "inet", "sealnet", "leases").stdout
    # Somebody has put the set back, and nothing else.
    host.run("nft", "delete", "table", "inet", "sealnet")
    host.run("nft", "-f", "-", input=leases)
    assert all(shared.has_lease(of) for of in MANY)

    answers = together(shared, shared._revoking, [partial(shared.revoke, of) for of in MANY])

    assert answers == [None] * len(MANY)
    assert not any(shared.has_lease(of) for of in MANY)
    host.run("nft", "delete", "table", "inet", "sealnet")
    shared.add_gate()


def test_one_that_is_refused_keeps_nobody_elses_lease_from_being_granted(
    host: Host, shared: SharedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.add_gate()
    real = Gate.grant

    def grant(self: Gate, seal: Seal, *, ttl_s: int) -> bool:
        if seal is MANY[3]:
            raise KernelRefused("cannot grant the lease: no", errno=28)
        return real(self, seal, ttl_s=ttl_s)

    def grant_all(self: Gate, wanted: Any) -> None:
        raise KernelRefused("cannot grant the leases: no", errno=28)

    monkeypatch.setattr(Gate, "grant", grant)
    monkeypatch.setattr(Gate, "grant_all", grant_all)

    granted = together(shared, shared._granting, [partial(shared.grant, of, ttl_s=90) for of in MANY])

    assert [isinstance(one, KernelRefused) for one in granted] == [of is MANY[3] for of in MANY]
    assert [shared.has_lease(of) for of in MANY] == [of is not MANY[3] for of in MANY]
    for of in MANY:
        shared.revoke(of)


def test_connections_are_looked_for_in_one_dump_and_each_is_told_of_its_own(
    host: Host, shared: SharedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = sockets.connected

    def connected(addresses: Any) -> Any:
        asked.append(len(addresses))
        return real(addresses)

    monkeypatch.setattr(sockets, "connected", connected)
    far = [IPv4Address(f"127.0.7.{number}") for number in range(1, 65)]
    plain = socket.create_server(("127.0.0.1", 0))
    dual = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    with plain, dual:
        near = [
            socket.create_connection(("127.0.0.1", server.getsockname()[1]), source_address=(str(far[at]), 0))
            for server, at in ((plain, 3), (dual, 7), (plain, 63))
        ]
        accepted = [plain.accept()[0], dual.accept()[0], plain.accept()[0]]

        found = together(shared, shared._asking, [partial(shared.is_connected, address) for address in far])

        assert [at for at, is_there in enumerate(found) if is_there] == [3, 7, 63]
        assert asked == [len(far)]
        for one in (*near, *accepted):
            one.close()
    assert not shared.is_connected(far[0])
