"""The seal over a fake kernel: what is done in which order, and what is left when anything of it fails or lies."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from sealnet import seal as sealing
from sealnet.errors import CannotTearDown, KernelRefused, NotSealed, SealnetError
from sealnet.kernel import sysctl
from sealnet.model.check import Check, Seen, Side
from sealnet.model.plan import Seal
from sealnet.seal import Applied, Kernel
from tests.fake import FakeKernel, Inside
from tests.model.build import sealed, severed

BUILD_SEALED = ["add_gate", "add_netns", "add_filter", "add_link", "bring_up", "see", "check_routes"]
BUILD_SEVERED = ["add_netns", "add_filter", "see"]
TEARDOWN = ["kill", "settle", "revoke", "remove_link", "remove_netns", "remove_cgroup"]

STANDS = """\
gate
link sealjzs5h67ivvs up 22:28:b1:28:67:87 198.18.0.1/30 group 0x5ea1 altname sealnet-run-1 "sealnet run-1 fd01:2a nobody: true"
netns sealnet-run-1 "sealnet run-1 fd01:2a" 1 handles
  lo up
  filter oifname "eth0" ip daddr 198.18.0.1 tcp dport 8080 | oifname "lo" fib daddr type local
  eth0 up 6e:51:7a:0a:ed:cf 198.18.0.2/30
"""


def apply(kernel: Kernel, seal: Seal, **options: Any) -> Applied:
    return sealing.apply(kernel, seal, alias="nobody: true", sysctls=sysctl.expected(), **options)


def teardown(kernel: Kernel, seal: Seal, inside: Inside | None, *, release: Callable[[str], None] = lambda _run_id: None) -> None:
    sealing.teardown(kernel, seal, inside=inside, release=release)


def a_whole_run(kernel: FakeKernel, seal: Seal) -> Inside:
    """Everything that a run can have: cgroup, seal, lease, and processes that are still there."""
    kernel.add_cgroup(seal.run_id)
    inside = apply(kernel, seal).inside
    kernel.grant(seal, ttl_s=90)
    kernel.change(processes={7: (inside.inode, seal.run_id), 8: (inside.inode, None)})
    kernel.calls.clear()
    return inside


# Apply


def test_the_gate_is_before_the_link_the_filter_before_the_link_and_the_link_up_last_before_the_check() -> None:
    kernel = FakeKernel()

    apply(kernel, sealed())

    assert kernel.calls == BUILD_SEALED
    assert kernel.text() == STANDS


def test_a_severed_run_has_no_link_and_touches_no_gate() -> None:
    kernel = FakeKernel()

    apply(kernel, severed())

    assert kernel.calls == BUILD_SEVERED
    assert kernel.text() == ('netns sealnet-run-1 "sealnet run-1 fd01:2a" 1 handles\n  lo up\n  filter oifname "lo" fib daddr type local\n')


def test_what_was_applied_is_handed_back() -> None:
    kernel = FakeKernel()

    applied = apply(kernel, sealed())

    assert kernel.world.names["sealnet-run-1"] == applied.inside.inode == applied.seen.netns_inode
    assert applied.ifindex is not None
    assert applied.seen.host.addresses == ("198.18.0.1/30",)
    assert [check.name for check in applied.checks] == ["read-back", "route-to-sandbox", "route-to-gateway", "route-to-canary"]


def test_what_takes_its_time_begins_when_nothing_is_up_yet() -> None:
    kernel = FakeKernel()
    begun = []

    apply(kernel, sealed(), begin=lambda inside: begun.append((inside.inode, kernel.text())))

    [(inode, text)] = begun
    assert inode == kernel.world.names["sealnet-run-1"]
    assert text == 'gate\nnetns sealnet-run-1 "sealnet run-1 fd01:2a" 1 handles\n  lo down\n'


def test_a_second_run_stands_beside_the_first() -> None:
    kernel = FakeKernel()
    apply(kernel, sealed())

    apply(kernel, severed("run-2"))

    assert kernel.text().startswith(STANDS)
    assert "netns sealnet-run-2" in kernel.text()


@pytest.mark.parametrize(("seal", "steps"), [(sealed(), BUILD_SEALED), (severed(), BUILD_SEVERED)], ids=["sealed", "severed"])
def test_a_failure_at_any_step_leaves_nothing_and_is_raised(seal: Seal, steps: list[str]) -> None:
    for number, step in enumerate(steps):
        kernel = FakeKernel(fail_at={number})

        with pytest.raises(KernelRefused, match=f"cannot {step}: "):
            apply(kernel, seal)

        assert kernel.left == "", step


# A real add_netns or add_gate that fails leaves nothing itself: their own contract, not that of apply.
@pytest.mark.parametrize("step", ["add_filter", "add_link", "bring_up", "see", "check_routes"])
def test_a_failure_that_comes_after_the_deed_leaves_nothing_either(step: str) -> None:
    kernel = FakeKernel(fail_in={step}, late=True)

    with pytest.raises(KernelRefused, match=f"cannot {step}: "):
        apply(kernel, sealed())

    assert kernel.left == ""


def test_a_bug_leaves_nothing_and_is_not_dressed_up() -> None:
    kernel = FakeKernel(fail_in={"bring_up"})
    kernel.error = ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        apply(kernel, sealed())

    assert kernel.left == ""


def test_what_begins_beside_the_rest_may_fail_as_well() -> None:
    kernel = FakeKernel()

    with pytest.raises(OSError, match="no"):
        apply(kernel, sealed(), begin=_refuse)

    assert kernel.left == ""


def _refuse(_inside: Inside) -> None:
    raise OSError("no")


def test_an_undo_that_fails_does_not_keep_the_others_from_being_tried() -> None:
    kernel = FakeKernel(fail_in={"bring_up", "remove_link"})

    with pytest.raises(KernelRefused) as caught:
        apply(kernel, sealed())

    # The handle is closed and the name removed; with the last holder of the namespace the link goes, too.
    assert kernel.calls[-2:] == ["remove_link", "remove_netns"]
    assert kernel.left == ""
    assert "bring_up" in str([caught.value, caught.value.__context__])


def test_a_failure_takes_nothing_away_that_is_another_runs() -> None:
    kernel = FakeKernel()
    apply(kernel, severed("run-2"))
    before = kernel.left
    kernel.fail_in = {"see"}

    with pytest.raises(KernelRefused):
        apply(kernel, sealed())

    assert kernel.left == before


# Lies


def _end(end: str, **change: Any) -> Callable[[Seen], Seen]:
    return lambda seen: dataclasses.replace(seen, **{end: dataclasses.replace(getattr(seen, end), **change)})


def _flip(end: str, key: str) -> Callable[[Seen], Seen]:
    def lie(seen: Seen) -> Seen:
        settings = getattr(seen, end).sysctls
        return _end(end, sysctls={**settings, key: "0" if settings[key] == "1" else "1"})(seen)

    return lie


def _whole(**change: Any) -> Callable[[Seen], Seen]:
    return lambda seen: dataclasses.replace(seen, **change)


LIES = {
    "is marked 'sealnet run-2 fd01:2a'": _whole(mark="sealnet run-2 fd01:2a"),
    "holds links lo, not lo and eth0 alone": _whole(links_inside=("lo",)),
    "holds links lo, eth0, eth1, not lo and eth0 alone": _whole(links_inside=("lo", "eth0", "eth1")),
    "the gate is gone": _whole(gate_fault="the gate is gone"),
    "the filter is gone": _whole(filter_fault="the filter is gone"),
    "link sealjzs5h67ivvs is gone": _whole(host=Side(exists=False)),
    "link eth0 of the sandbox is gone": _whole(inside=Side(exists=False)),
    "link sealjzs5h67ivvs is in group 0x0": _end("host", group=0),
}
for _side, _name in (("host", "link sealjzs5h67ivvs"), ("inside", "link eth0 of the sandbox")):
    LIES |= {
        f"{_name} is down": _end(_side, up=False),
        f"{_name} has MAC 02:00:00:00:00:01": _end(_side, mac="02:00:00:00:00:01"),
        f"{_name} is enslaved to link 3": _end(_side, master=3),
        f"{_name} has address none": _end(_side, addresses=()),
        f"{_name} has address 198.18.0.1/30, 198.18.0.2/30": _end(_side, addresses=("198.18.0.1/30", "198.18.0.2/30")),
    }
    LIES |= {f"{_name} has {key.rpartition('/')[2]} = ": _flip(_side, key) for key in sysctl.expected()}


@pytest.mark.parametrize(("words", "lie"), LIES.items(), ids=list(LIES))
def test_what_reads_back_otherwise_is_refused_by_name_and_taken_away(words: str, lie: Callable[[Seen], Seen]) -> None:
    kernel = FakeKernel()
    kernel.lie = lie

    with pytest.raises(NotSealed, match=r"^cannot seal run run-1: ") as caught:
        apply(kernel, sealed())

    assert words in caught.value.message
    assert kernel.left == ""


@pytest.mark.parametrize(
    ("words", "lie"),
    [
        ("holds links lo, eth0; a severed run has lo alone", _whole(links_inside=("lo", "eth0"))),
        ("the filter is gone", _whole(filter_fault="the filter is gone")),
        ("is marked ''", _whole(mark="")),
    ],
)
def test_a_severed_run_that_reads_back_otherwise_is_refused_too(words: str, lie: Callable[[Seen], Seen]) -> None:
    kernel = FakeKernel()
    kernel.lie = lie

    with pytest.raises(NotSealed, match=words):
        apply(kernel, severed())

    assert kernel.left == ""


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("ok", [False, None])
def test_a_route_that_leads_elsewhere_or_cannot_be_told_is_refused_by_name(number: int, ok: bool | None) -> None:
    kernel = FakeKernel()
    told: list[Check] = []

    def lie(checks: list[Check]) -> list[Check]:
        told[:] = checks
        told[number] = dataclasses.replace(checks[number], ok=ok, found="dev wg0; ip rule 100: lookup 51820")
        return told

    kernel.lie_on_routes = lie

    with pytest.raises(NotSealed, match="dev wg0; ip rule 100: lookup 51820") as caught:
        apply(kernel, sealed())

    assert told[number].name in caught.value.message
    assert "repeat the command quoted above" in (caught.value.hint or "")
    assert kernel.left == ""


def test_a_sealed_run_of_which_no_route_was_asked_is_refused() -> None:
    kernel = FakeKernel()
    kernel.lie_on_routes = lambda _checks: []

    with pytest.raises(NotSealed):
        apply(kernel, sealed())


def test_whoever_has_no_route_to_repeat_is_not_told_to_repeat_one() -> None:
    kernel = FakeKernel()
    kernel.lie = _end("host", up=False)

    with pytest.raises(NotSealed) as caught:
        apply(kernel, sealed())

    assert caught.value.hint is None or "quoted above" not in caught.value.hint


def test_all_that_is_wrong_is_told_at_once() -> None:
    kernel = FakeKernel()
    kernel.lie = lambda seen: _whole(mark="")(_end("host", up=False)(seen))
    kernel.change(shadowed=True)

    with pytest.raises(NotSealed) as caught:
        apply(kernel, sealed())

    assert all(words in caught.value.message for words in ("is marked ''", "is down", "route-to-sandbox: "))


def test_what_one_policy_rule_bends_is_told_once() -> None:
    kernel = FakeKernel()
    kernel.change(shadowed=True)

    with pytest.raises(NotSealed) as caught:
        apply(kernel, sealed())

    assert caught.value.message.count("found prohibited") == 1
    assert caught.value.message.endswith(" (as does route-to-gateway)")


# Teardown


def test_processes_end_first_and_the_subnet_is_released_last() -> None:
    kernel = FakeKernel()
    inside = a_whole_run(kernel, sealed())

    teardown(kernel, sealed(), inside, release=lambda run_id: kernel.calls.append(f"release {run_id}"))

    assert kernel.calls == [*TEARDOWN, "release run-1"]
    assert kernel.text() == "gate\n"


def test_nothing_but_the_run_id_is_needed() -> None:
    kernel = FakeKernel()
    inside = a_whole_run(kernel, sealed())
    inside.close()

    teardown(kernel, severed(), kernel.join("run-1"))

    assert "sandbox_of" in kernel.calls
    assert kernel.text() == "gate\n"


def test_a_second_teardown_changes_nothing_and_succeeds() -> None:
    kernel = FakeKernel()
    inside = a_whole_run(kernel, sealed())
    apply(kernel, severed("run-2"))
    teardown(kernel, sealed(), inside)
    before = kernel.text()
    released: list[str] = []

    teardown(kernel, sealed(), None, release=released.append)
    teardown(kernel, sealed(), inside, release=released.append)

    assert kernel.text() == before
    assert released == ["run-1", "run-1"]


@pytest.mark.parametrize("step", TEARDOWN)
def test_a_step_that_fails_keeps_the_reservation_and_no_other_step_from_being_tried(step: str) -> None:
    kernel = FakeKernel()
    inside = a_whole_run(kernel, sealed())
    kernel.fail_in = {step}
    released: list[str] = []

    with pytest.raises(CannotTearDown, match=f"^cannot tear down run run-1: cannot {step}: Operation not permitted") as caught:
        teardown(kernel, sealed(), inside, release=released.append)

    assert kernel.calls == TEARDOWN
    assert caught.value.hint == "try again: sealnet reap run-1"
    assert released == []

    kernel.fail_in = set()
    teardown(kernel, sealed(), kernel.join("run-1"), release=released.append)

    assert kernel.text() == "gate\n"
    assert released == ["run-1"]


def test_all_failures_are_gathered() -> None:
    for steps in [*map(set, itertools.combinations(TEARDOWN, 2)), set(TEARDOWN)]:
        kernel = FakeKernel()
        inside = a_whole_run(kernel, sealed())
        kernel.fail_in = steps

        with pytest.raises(CannotTearDown) as caught:
            teardown(kernel, sealed(), inside)

        group = caught.value.__cause__
        assert isinstance(group, ExceptionGroup)
        # What an injected failure keeps alive may make a later step fail as well.
        assert steps <= {str(error).split(":")[0].removeprefix("cannot ") for error in group.exceptions}
        assert all(str(error) in caught.value.message for error in group.exceptions)
        assert set(TEARDOWN) <= set(kernel.calls)


def test_a_bug_in_one_step_is_gathered_with_the_step_it_was_in() -> None:
    kernel = FakeKernel(fail_in={"revoke"})
    kernel.error = ZeroDivisionError
    released: list[str] = []

    with pytest.raises(CannotTearDown) as caught:
        teardown(kernel, sealed(), None, release=released.append)

    assert isinstance(caught.value.__cause__, ExceptionGroup)
    [error] = caught.value.__cause__.exceptions
    assert isinstance(error, ZeroDivisionError)
    assert error.__notes__ == ["while sealnet tried to revoke its lease"]
    assert released == []


def test_a_release_that_fails_is_a_failed_teardown() -> None:
    def release(_run_id: str) -> None:
        raise SealnetError("cannot release: no")

    with pytest.raises(CannotTearDown, match="cannot release: no"):
        teardown(FakeKernel(), sealed(), None, release=release)


def test_whoever_asks_to_stop_is_not_made_to_wait_for_the_other_steps() -> None:
    kernel = FakeKernel(fail_in={"kill"})
    kernel.error = KeyboardInterrupt  # type: ignore[assignment]

    with pytest.raises(KeyboardInterrupt):
        teardown(kernel, sealed(), None)


# Strangers


def test_a_teardown_leaves_another_state_directorys_run_of_the_same_id_alone() -> None:
    kernel = FakeKernel()
    kernel.tag = "fd01:99"
    a_whole_run(kernel, sealed())
    kernel.change(leases={})
    before = kernel.world
    kernel.tag = "fd01:2a"

    assert kernel.join("run-1") is None
    teardown(kernel, sealed(), None)

    assert kernel.world == before


# The fake itself


def test_the_fake_is_a_kernel() -> None:
    kernel: Kernel = FakeKernel()

    assert kernel.tag


def test_a_fake_is_told_apart_by_its_value() -> None:
    one, other = FakeKernel(), FakeKernel()

    apply(one, sealed())
    apply(other, sealed())

    assert one.world == other.world
    other.change_link("sealjzs5h67ivvs", up=False)
    assert one.world != other.world
    assert one.text() != other.text()
