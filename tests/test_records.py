"""The state directory: one run has an id, whoever dies leaves nothing that is not found, and nobody sees half a record."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from sealnet.errors import CannotSeal, NoSuchRun, RunExists, UsageError
from sealnet.kernel import locks, process
from sealnet.records import Claim, State
from tests.crash import descriptors, elsewhere, steps_of
from tests.lab import wait_for
from tests.model.build import a_record

FIRST, SECOND = IPv4Network("198.18.0.0/30"), IPv4Network("198.18.0.4/30")


@pytest.fixture
def state(tmp_path: Path) -> State:
    state = State(tmp_path / "state")
    state.prepare()
    return state


@contextlib.contextmanager
def claimed(state: State, run_id: str = "run-1") -> Iterator[Claim]:
    claim = state.claim(a_record(run_id))
    try:
        yield claim
    finally:
        claim.close()


def entries(state: State) -> list[str]:
    return sorted(os.listdir(state.runs))


# The directory


def test_only_root_may_look_into_the_records(state: State) -> None:
    state.prepare()

    assert {path.name: oct(path.stat().st_mode & 0o777) for path in (state.path, state.runs, state.subnets, state.stage)} == {
        "state": "0o711",
        "runs": "0o700",
        "subnets": "0o700",
        "stage": "0o700",
    }


@pytest.mark.parametrize("name", [".", "runs", "subnets", "stage"])
def test_a_directory_that_others_may_write_is_refused(state: State, name: str) -> None:
    for mode in (0o720, 0o702, 0o777):
        (state.path / name).chmod(mode)

        with pytest.raises(CannotSeal, match="it must be a directory of root's that nobody else may write") as caught:
            state.prepare()

        assert caught.value.hint == f"look at it: ls -ld {state.path / name}"


def test_a_directory_that_is_somebody_elses_is_refused(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: state.path.stat().st_uid + 1)

    with pytest.raises(CannotSeal, match="cannot use state directory"):
        state.prepare()


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("/tmp"), lambda path: path.symlink_to("nowhere")])
def test_what_is_no_directory_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "state")

    with pytest.raises(CannotSeal, match=r"cannot (use|make) state directory"):
        State(tmp_path / "state").prepare()


def test_the_environment_says_where_it_is_unless_the_caller_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALNET_STATE_DIR", "/elsewhere")

    assert State().path == Path("/elsewhere")
    assert State("/here").path == Path("/here")
    monkeypatch.delenv("SEALNET_STATE_DIR")
    assert State().path == Path("/run/sealnet")


def test_a_tag_tells_two_state_directories_apart(state: State, tmp_path: Path) -> None:
    other = State(tmp_path / "other")
    other.prepare()

    assert state.tag == State(state.path).tag
    assert state.tag != other.tag


# Claims


def test_a_claim_is_there_whole_and_held(state: State) -> None:
    with claimed(state):
        assert entries(state) == state.run_ids() == ["run-1"]
        assert state.read("run-1") == a_record()
        assert state.is_held("run-1")


def test_a_second_claim_of_a_live_run_is_refused_and_leaves_the_first_alone(state: State) -> None:
    with claimed(state):
        with pytest.raises(RunExists, match="cannot claim run run-1: a run of that id exists") as caught:
            state.claim(a_record(command="other"))

        assert caught.value.hint == "choose another id, or end it: sealnet reap run-1"
        assert state.read("run-1").command == "true"
        assert state.is_held("run-1")
        assert entries(state) == ["run-1"]


def test_a_refused_claim_keeps_no_descriptor(state: State) -> None:
    """A daemon that loses one at each refusal cannot use libnftables any more after a thousand."""
    with claimed(state):
        before = descriptors()

        with pytest.raises(RunExists):
            state.claim(a_record())

        assert descriptors() == before


def test_a_dead_run_that_nobody_has_reaped_keeps_its_id(state: State) -> None:
    with claimed(state):
        pass

    assert not state.is_held("run-1")
    with pytest.raises(RunExists):
        state.claim(a_record())


def test_of_many_who_claim_at_once_one_gets_the_id(state: State) -> None:
    together, got, refused = threading.Barrier(8), [], []

    def claim() -> None:
        together.wait()
        try:
            got.append(state.claim(a_record()))
        except RunExists as error:
            refused.append(error)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(got) == 1
    assert len(refused) == 7
    assert entries(state) == ["run-1"]
    got[0].close()


def test_a_lock_is_let_go_by_the_kernel_with_the_process_that_held_it(state: State) -> None:
    elsewhere(lambda: state.claim(a_record()))

    assert state.run_ids() == ["run-1"]
    assert not state.is_held("run-1")


def test_asking_whether_it_is_held_holds_nothing(state: State) -> None:
    with claimed(state):
        pass

    assert [state.is_held("run-1") for _ in range(3)] == [False] * 3
    assert not state.is_held("run-2")


def test_a_host_without_space_refuses_the_claim_in_words(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)

    with pytest.raises(CannotSeal, match="cannot claim run run-1: No space left on device"):
        state.claim(a_record())


def tears_down(state: State) -> None:
    with state.teardown_lock("run-1"):
        state.forget_leftovers("run-1")


@pytest.mark.parametrize("deed", [lambda state: state.claim(a_record()), tears_down], ids=["claim", "teardown"])
def test_who_is_out_of_descriptors_leaves_nothing_behind(state: State, deed: Callable[[State], Any]) -> None:
    outcomes = set()

    def with_spare(spare: int) -> None:
        most = max(map(int, os.listdir("/proc/self/fd"))) + 16
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        held = []
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for fd in held[len(held) - spare :]:
            os.close(fd)
        try:
            deed(state)
        except (OSError, CannotSeal):
            os._exit(3)
        os._exit(0)

    for spare in range(6):
        if (child := os.fork()) == 0:
            with_spare(spare)
        outcomes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        for run_id in state.run_ids():
            state.forget(run_id)
        # What has a run's name is found by whoever reaps; nobody looks for what has none until this process is gone.
        assert entries(state) == []
    assert outcomes == {0, 3}


def test_a_claimant_who_dies_at_any_step_leaves_what_sweep_removes_or_reap_finds(state: State) -> None:
    claims = 0

    def after() -> None:
        nonlocal claims
        state.sweep()
        if state.run_ids():
            # It died with its claim made: an orphan, like any other.
            assert state.read("run-1") == a_record()
            assert not state.is_held("run-1")
            state.forget("run-1")
            claims += 1
        assert entries(state) == []
        with claimed(state):
            pass
        state.forget("run-1")

    assert steps_of(lambda: state.claim(a_record()), after) > 5
    assert claims > 0


def test_a_sweep_leaves_runs_and_claims_alone(state: State) -> None:
    with claimed(state), claimed(state, "run-2"):
        state.sweep()

        assert entries(state) == ["run-1", "run-2"]


def test_a_sweep_leaves_a_claim_alone_that_is_being_made(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `sealnet run` sweeps, so two that start together meet here."""
    real = locks.new

    def new(path: Path) -> int:
        meanwhile(state.sweep)
        fd = real(path)
        meanwhile(state.sweep)
        return fd

    monkeypatch.setattr(locks, "new", new)

    with claimed(state):
        assert state.run_ids() == ["run-1"]


def test_a_sweep_leaves_a_teardown_alone_that_begins(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.touch

    def touch(path: Path, *arguments: Any, **options: Any) -> None:
        meanwhile(state.sweep)
        real(path, *arguments, **options)

    monkeypatch.setattr(Path, "touch", touch)

    with state.teardown_lock("run-1") as recorded:
        assert not recorded


def meanwhile(deed: Callable[[], object]) -> None:
    """What somebody else does now, unless a lock makes them wait."""
    thread = threading.Thread(target=deed)
    thread.start()
    thread.join(0.2)


# Records


def test_a_reader_sees_the_old_record_or_the_new_one_whoever_dies_when(state: State) -> None:
    seen = set()
    with claimed(state) as claim:
        steps = steps_of(lambda: claim.update(state="built"), lambda: seen.add(state.read("run-1").state))

    assert steps > 2
    assert "claimed" in seen
    assert seen <= {"claimed", "built"}
    assert state.read("run-1").state == "built"
    state.forget("run-1")
    assert entries(state) == []


def test_a_change_is_added_to_what_was_changed_before(state: State) -> None:
    with claimed(state) as claim:
        claim.update(state="built", netns_inode=5)
        claim.update(state="proved")

        assert state.read("run-1") == a_record(state="proved", netns_inode=5) == claim.record


def test_a_run_that_somebody_has_reaped_is_not_written_down_again(state: State) -> None:
    with claimed(state) as claim:
        state.forget("run-1")
        with claimed(state) as next_:
            next_.update(command="next")

            claim.update(state="exited")

            assert not claim.stands()
            assert next_.stands()
            assert state.read("run-1").command == "next"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "cannot read the record of run run-1"),
        (b"{", "cannot read the record of run run-1"),
        (b"\xff\xfe", "cannot read the record of run run-1"),
        (b"[]", "cannot read the record of run run-1: not a record"),
        (b'{"schema": "sealnet.record/1"}', "cannot read the record of run run-1: not a record"),
    ],
)
def test_a_garbled_record_is_said_to_be_one_and_how_to_take_it_away(state: State, text: bytes, words: str) -> None:
    with claimed(state):
        (state.directory("run-1") / "record.json").write_bytes(text)

        with pytest.raises(NoSuchRun, match=words) as caught:
            state.read("run-1")

    assert caught.value.hint == "take it away: sealnet reap run-1"


def test_a_run_that_never_was_is_not_found(state: State) -> None:
    with pytest.raises(NoSuchRun, match="cannot find run run-1: there is no record of it"):
        state.read("run-1")


def test_only_run_ids_are_runs(state: State) -> None:
    for name in (".run-1.0badcafe", "Run", "a_b", "lost+found"):
        (state.runs / name).mkdir()

    with claimed(state, "b"), claimed(state, "a"):
        assert state.run_ids() == ["a", "b"]


def test_a_state_directory_that_never_was_has_no_run_and_no_reservation(tmp_path: Path) -> None:
    state = State(tmp_path / "never")

    assert state.run_ids() == []
    assert state.reservations() == {}
    state.sweep()
    state.release("run-1")
    state.forget("run-1")
    assert not state.path.exists()


def test_the_last_step_of_a_teardown_may_die_anywhere_and_be_done_again(state: State) -> None:
    def make() -> None:
        with claimed(state) as claim:
            claim.update(state="exited")
            os.close(claim.open_status())

    make()

    def after() -> None:
        state.forget("run-1")
        assert entries(state) == []
        make()

    assert steps_of(lambda: state.forget("run-1"), after) > 3
    assert entries(state) == []


def test_whoever_claims_the_id_as_its_last_file_goes_does_not_make_the_teardown_fail(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    with claimed(state):
        pass
    real, next_ = os.rmdir, []

    def rmdir(path: Any, *arguments: Any, **options: Any) -> None:
        # The directory is empty, and rename(2) replaces an empty directory.
        next_.append(state.claim(a_record(command="next")))
        real(path, *arguments, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    try:
        state.forget("run-1")

        assert state.read("run-1").command == "next"
    finally:
        next_[0].close()


# Teardown


def test_a_teardown_says_whether_there_was_a_record(state: State) -> None:
    with state.teardown_lock("run-1") as recorded:
        assert not recorded
        state.forget("run-1")
    with claimed(state), state.teardown_lock("run-1") as recorded:
        assert recorded


def test_while_leftovers_are_taken_away_a_claim_of_the_id_waits(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, got = threading.Event(), []
    thread = threading.Thread(target=lambda: got.append(state.claim(a_record())))
    real = time.sleep

    def sleep(seconds: float) -> None:
        if threading.current_thread() is thread:
            waiting.set()
        real(seconds)

    monkeypatch.setattr(time, "sleep", sleep)

    with state.teardown_lock("run-1"):
        thread.start()
        assert waiting.wait(60)
        assert not got
        state.forget("run-1")
    thread.join(60)

    assert [claim.record.run_id for claim in got] == ["run-1"]
    assert state.is_held("run-1")
    got[0].close()


def test_a_claim_that_comes_just_as_leftovers_are_gone_gets_the_id(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = os.rename, []

    def rename(source: Any, dest: Any, **options: Any) -> None:
        try:
            real(source, dest, **options)
        except OSError:
            if not refused:
                refused.append(dest)
                state.forget("run-1")
            raise

    with state.teardown_lock("run-1"):
        monkeypatch.setattr(os, "rename", rename)
        with claimed(state):
            assert state.run_ids() == ["run-1"]
    assert refused


def test_while_a_recorded_run_is_taken_away_a_claim_of_the_id_is_refused_at_once(state: State) -> None:
    with claimed(state):
        pass
    began = time.monotonic()

    with state.teardown_lock("run-1"), pytest.raises(RunExists):
        state.claim(a_record())

    # The wait for the one who takes away would be 10 s.
    assert time.monotonic() - began < 5


def test_two_teardowns_of_one_run_go_one_after_the_other(state: State) -> None:
    with claimed(state):
        pass
    order: list[str] = []

    def second() -> None:
        with state.teardown_lock("run-1") as recorded:
            order.append(f"second, recorded {recorded}")
            state.forget("run-1")

    thread = threading.Thread(target=second)
    with state.teardown_lock("run-1") as recorded:
        thread.start()
        wait_for(lambda: waits_for_a_lock(thread), what="the second waits for the first")
        order.append(f"first, recorded {recorded}")
        state.forget("run-1")
    thread.join(60)

    assert order == ["first, recorded True", "second, recorded False"]
    assert entries(state) == []


def waits_for_a_lock(thread: threading.Thread) -> bool:
    """By /proc/locks, where a blocked one has an arrow; the kernel knows this thread by its process."""
    lines = Path("/proc/locks").read_text().splitlines()
    return thread.is_alive() and any(" -> FLOCK " in line and f" {os.getpid()} " in line for line in lines)


@pytest.mark.parametrize("error", [ValueError, FileNotFoundError, OSError, KeyboardInterrupt])
def test_what_goes_wrong_in_a_teardown_is_raised_as_it_is_and_lets_the_lock_go(state: State, error: type[BaseException]) -> None:
    with claimed(state):
        pass

    with pytest.raises(error, match="mine"), state.teardown_lock("run-1"):
        raise error("mine")

    with state.teardown_lock("run-1") as recorded:
        assert recorded


def test_a_teardown_that_died_is_taken_over(state: State) -> None:
    elsewhere(lambda: state.teardown_lock("run-1").__enter__())
    assert state.run_ids() == ["run-1"]

    with state.teardown_lock("run-1") as recorded:
        assert not recorded
        state.forget("run-1")
    assert entries(state) == []


# Reservations


def test_a_subnet_is_reserved_once(state: State) -> None:
    state.reserve(FIRST, "run-1")

    with pytest.raises(FileExistsError):
        state.reserve(FIRST, "run-2")

    assert state.reservations() == {FIRST: "run-1"}


def test_a_run_gives_back_what_is_its_own_and_nothing_else(state: State) -> None:
    state.reserve(FIRST, "run-1")
    state.reserve(SECOND, "run-2")

    state.release("run-1")
    state.release("run-1")

    assert state.reservations() == {SECOND: "run-2"}
    state.reserve(FIRST, "run-3")


def test_what_is_no_prefix_is_no_reservation(state: State) -> None:
    (state.subnets / "README").write_text("run-1")
    state.reserve(FIRST, "run-1")

    assert state.reservations() == {FIRST: "run-1"}


def test_whoever_reserves_holds_the_lock_alone(state: State) -> None:
    with state.allocating():
        assert locks.is_held(state.path / "alloc.lock")
    assert not locks.is_held(state.path / "alloc.lock")


@pytest.mark.parametrize("run_id", ["..", ".", "../subnets", "x/y", "X"])
def test_no_name_leads_out_of_the_directory(state: State, run_id: str) -> None:
    before = sorted(os.listdir(state.path))

    for deed in (state.directory, state.read, state.is_held, state.forget, state.take_over, state.status):
        with pytest.raises(UsageError, match="cannot use run id"):
            deed(run_id)
    with pytest.raises(UsageError, match="cannot use run id"), state.teardown_lock(run_id):
        pass

    assert sorted(os.listdir(state.path)) == before


def test_a_claim_whose_maker_has_ended_is_swept_though_nobody_has_waited_for_him(state: State) -> None:
    with subprocess.Popen(["true"]) as dead, subprocess.Popen(["sleep", "60"]) as lives:
        wait_for(lambda: not process.lives(dead.pid), what="it has ended")
        for maker in (dead, lives):
            (state.runs / f".run-1.0a.{maker.pid}.{process.start_time(maker.pid)}").mkdir()

        state.sweep()

        assert os.listdir(state.runs) == [f".run-1.0a.{lives.pid}.{process.start_time(lives.pid)}"]
        lives.kill()
