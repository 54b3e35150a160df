"""libnftables in another process: the same answers, in the namespace of whoever asks, and its death is an error that passes."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import threading
from collections.abc import Iterator

import pytest

from sealnet.errors import CannotSeal, KernelRefused
from sealnet.kernel import libc, nft, process
from sealnet.kernel.netns import Inside
from sealnet.kernel.nft import Nft
from sealnet.kernel.nfthelper import Helper
from tests.lab import Host, wait_for

pytestmark = pytest.mark.root

TABLE = "add table inet helped; add set inet helped ports { type inet_service; }; add element inet helped ports { 1, 2, 3 }"


@pytest.fixture
def helper(host: Host) -> Iterator[Helper]:
    made = Helper()
    nft.run_by(made)
    yield made
    nft.run_by(None)
    made.close()
    with contextlib.suppress(KernelRefused):
        Nft().apply("delete table inet helped", "clean up")


def test_it_answers_as_the_library_does(helper: Helper) -> None:
    there, here = Nft(), nft.Library()

    there.apply(TABLE, "add the table")

    assert there.elements("inet helped ports", "list them") == [1, 2, 3]
    assert there.elements("inet helped others", "list them") == []
    assert there.version() == Nft().version() != "unknown"
    assert here.run("list table inet helped", as_json=False)[0] == 0
    with pytest.raises(KernelRefused) as refused:
        there.apply("delete table inet nobodys", "delete it")
    assert refused.value.errno == errno.ENOENT
    with pytest.raises(KernelRefused, match=r"cannot load it: .*syntax error"):
        there.apply("add tabel", "load it")


def test_it_works_where_the_asker_is_and_stays_nowhere(helper: Helper, host: Host) -> None:
    with Inside.new("one") as one, Inside.new("two") as two:
        for inside in (one, two):
            # It is started from there, by somebody with mounts of their own.
            inside.call(libc.unshare, libc.CLONE_NEWNS)
            inside.call(lambda: Nft().apply(TABLE, "add the table"))
        two.call(lambda: Nft().apply("delete table inet helped", "delete it"))

        assert one.call(lambda: Nft().elements("inet helped ports", "list them")) == [1, 2, 3]
        assert two.call(lambda: Nft().elements("inet helped ports", "list them")) == []
        assert Nft().elements("inet helped ports", "list them") == []
        # Nothing of the helper's is in a namespace that it has been asked about.
        for kind in ("net", "mnt"):
            tasks = [f"/proc/{helper.pid}/task/{task}/ns/{kind}" for task in os.listdir(f"/proc/{helper.pid}/task")]
            assert {os.stat(path).st_ino for path in tasks} == {os.stat(f"/proc/self/ns/{kind}").st_ino}
        own = os.stat("/proc/self/ns/net").st_ino
        links = [os.readlink(f"/proc/{helper.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{helper.pid}/fd")]
        assert {link for link in links if link.startswith("net:")} == {f"net:[{own}]"}


def test_its_death_is_an_error_of_who_asks_and_the_next_has_another(helper: Helper) -> None:
    one = Nft()
    one.apply(TABLE, "add the table")
    first = helper.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    wait_for(lambda: process.is_stopped(first), what="it is halted")
    failed: list[Exception] = []

    def ask() -> None:
        try:
            one.elements("inet helped ports", "list them")
        except CannotSeal as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: not helper._idle, what="somebody asks")
    os.kill(first, signal.SIGKILL)
    asking.join()

    assert len(failed) == 1
    assert one.elements("inet helped ports", "list them") == [1, 2, 3]
    assert helper.pid not in (None, first)
    # One that has died while nobody asked is noticed by nobody.
    second = helper.pid
    assert second is not None
    os.kill(second, signal.SIGKILL)
    # Its last thread, too: the first one is a zombie before.
    wait_for(lambda: os.waitid(os.P_PID, second, os.WEXITED | os.WNOWAIT | os.WNOHANG), what="it is dead")
    assert one.elements("inet helped ports", "list them") == [1, 2, 3]


def test_many_ask_at_once(helper: Helper) -> None:
    found: list[object] = []

    def ask(number: int) -> None:
        one = Nft()
        one.apply(f"add table inet helped; add set inet helped s{number} {{ type inet_service; elements = {{ {number} }}; }}", "add it")
        found.append(one.elements(f"inet helped s{number}", "list it"))

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(1, 17)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()

    assert sorted(map(str, found)) == sorted(str([number]) for number in range(1, 17))


def test_a_process_with_more_descriptors_than_the_library_can_name_has_its_answers(helper: Helper) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.fail("this needs a limit of 2,048 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    held = [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) for _ in range(1100)]
    try:
        Nft().apply(TABLE, "add the table")
        assert Nft().elements("inet helped ports", "list them") == [1, 2, 3]
        with pytest.raises(CannotSeal, match="cannot use file descriptors"):
            nft.Library()
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
