"""The bwrap command line: pinned word for word, and what must hold of every one of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from sealnet.model import argv, environment
from sealnet.model.argv import Fds, Seen, Tools
from sealnet.model.plan import Bind, Plan, profile
from tests.golden import assert_golden, lines_of
from tests.model.build import NOBODY, a_plan

GOLDEN = Path(__file__).with_name("golden")
FDS = Fds(args=11, info=12, status=13, block=14, alive=15, seccomp=16)
ROOT = "/run/sealnet/stage/root"
DEV = "/run/sealnet/stage/dev1"
CGROUP = "/sys/fs/cgroup/sealnet/run-1"
TOOLS = Tools(sh="/usr/bin/sh", bwrap="/usr/bin/bwrap", setsid="/usr/bin/setsid", setpriv="/usr/bin/setpriv", env="/usr/bin/env")
WHOLE = Seen(
    proc=frozenset((*argv.READ_ONLY, *argv.MASKED_FILES, *argv.MASKED_DIRECTORIES)),
    sysfs=frozenset(argv.MASKED_SYS),
)
# A kernel that has less.
SMALL = Seen(proc=frozenset({"sys", "sysrq-trigger", "kcore"}), sysfs=frozenset({"/sys/firmware"}))

SEVERED = a_plan(environment={"PATH": "/usr/bin:/bin", "HOME": "/root"}, argv=("sh", "-c", "exit 3"))
SEALED = a_plan(
    lease_port=8080,
    broker_env=("OPENAI_BASE_URL",),
    user=NOBODY,
    cwd="/home/ann/work",
    chdir="/home/ann/work/src",
    argv=("A=B", "--help", "two words"),
    environment={"PATH": "/usr/bin:/bin", "LD_PRELOAD": "/opt/x.so", "TMPDIR": "/scratch", "TOKEN": "s3cret\nline"},
    binds=(
        Bind(source="/opt/data", dest="/data", writable=False),
        Bind(source="/var/cache/pip", dest="/cache", writable=True),
    ),
    tmpfs=("/scratch",),
    bwrap_args=profile(b"--tmpfs\n/opt\n--hostname\nbox"),
    allow_userns=True,
)


def told(plan: Plan) -> Mapping[str, str]:
    """The payload's variables, as the launch makes them."""
    url = "http://198.18.0.1:8080" if plan.lease_port else None
    return environment.sealed(plan.environment, run_id=plan.run_id, broker_url=url, broker_env=plan.broker_env)


def options(plan: Plan, seen: Seen = WHOLE, *, die_with_parent: bool = True) -> list[str]:
    return argv.render_options(plan, ROOT, DEV, seen, FDS, told(plan), die_with_parent=die_with_parent)


def command(plan: Plan, *, cgroup: str | None = None, controlling_terminal: bool = False) -> list[str]:
    return argv.render_command(plan, cgroup, FDS, told(plan), TOOLS, controlling_terminal=controlling_terminal)


def at(words: list[str], *run: str) -> int:
    """Where `run` stands in `words`; it must stand there once."""
    found = [n for n in range(len(words)) if tuple(words[n : n + len(run)]) == run]
    assert len(found) == 1, (run, found)
    return found[0]


@pytest.mark.parametrize(
    ("name", "plan", "seen", "die_with_parent", "controlling_terminal"),
    [("severed-root", SEVERED, WHOLE, True, True), ("sealed-nobody", SEALED, SMALL, False, False)],
)
def test_bwraps_options_and_command_are_word_for_word_what_was_signed(
    name: str, plan: Plan, seen: Seen, die_with_parent: bool, controlling_terminal: bool
) -> None:
    assert_golden(GOLDEN / f"{name}.options", lines_of(options(plan, seen, die_with_parent=die_with_parent)))
    assert_golden(GOLDEN / f"{name}.command", lines_of(command(plan, controlling_terminal=controlling_terminal)))


# The file system


def test_what_locks_the_view_down_stands_after_the_profile() -> None:
    words = options(SEALED, SMALL)

    view, proc, own = at(words, "--bind", ROOT, "/"), at(words, "--proc", "/proc"), at(words, "--tmpfs", "/opt")
    assert view < proc < own < at(words, "--ro-bind", "/proc/sys", "/proc/sys") < at(words, "--ro-bind", "/dev/null", "/proc/kcore")


def test_only_what_the_host_has_is_masked() -> None:
    lacking = {"/proc/keys", "/proc/acpi", "/proc/bus", "/sys/devices/virtual/dmi"}

    assert "/proc/kcore" in options(SEVERED, SMALL)
    assert not lacking & set(options(SEVERED, SMALL))
    assert lacking <= set(options(SEVERED, WHOLE))


def test_nothing_of_the_host_is_shown_but_what_was_put_together() -> None:
    for plan in (SEVERED, SEALED):
        words = options(plan)
        sources = {words[n + 1] for n, word in enumerate(words) if word in ("--bind", "--ro-bind", "--dev-bind")}

        assert sources <= {ROOT, DEV, "/dev/null", *(f"/proc/{name}" for name in argv.READ_ONLY)}


# What leaves no other way


@pytest.mark.parametrize("plan", [SEVERED, SEALED])
def test_bwrap_joins_the_namespace_that_it_is_started_in(plan: Plan) -> None:
    words = options(plan) + command(plan)

    assert not {"--unshare-net", "--unshare-all", "--unshare-user", "--share-net"} & set(words)
    assert {"--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup"} <= set(words)


@pytest.mark.parametrize("plan", [SEVERED, SEALED])
def test_setpriv_drops_every_capability_set(plan: Plan) -> None:
    words = command(plan)

    assert {"--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"} <= set(words)
    assert words.index(TOOLS.bwrap) < words.index(TOOLS.setsid) < words.index(TOOLS.setpriv) < words.index(TOOLS.env)


def test_bwrap_keeps_the_capabilities_that_setpriv_needs_and_no_other() -> None:
    words = options(SEVERED)

    assert {words[n + 1] for n, word in enumerate(words) if word == "--cap-add"} == {"CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"}
    assert at(words, "--cap-drop", "ALL") < words.index("--cap-add")


def test_a_user_without_groups_gets_none_of_the_callers() -> None:
    assert "--clear-groups" in command(SEALED)
    assert at(command(SEVERED), "--groups", "0")


def test_where_nothing_else_moves_it_a_shell_joins_the_cgroup_first() -> None:
    joined = command(SEVERED, cgroup=CGROUP)

    assert joined[:5] == [TOOLS.sh, "-c", argv.JOIN, "sealnet", CGROUP]
    assert joined[5:] == command(SEVERED)
    assert command(SEVERED)[0] == TOOLS.bwrap


@pytest.mark.parametrize("wanted", [False, True])
def test_a_run_dies_with_its_parent_and_has_a_terminal_when_that_is_asked(wanted: bool) -> None:
    assert ("--die-with-parent" in options(SEVERED, die_with_parent=wanted)) is wanted
    assert ("--ctty" in command(SEVERED, controlling_terminal=wanted)) is wanted


# Variables and words


def test_a_value_is_in_no_process_list_but_what_only_the_payload_may_obey() -> None:
    listed = command(SEALED)

    assert not any("s3cret" in word for word in listed)
    assert "s3cret\nline" in options(SEALED)
    assert {"LD_PRELOAD=/opt/x.so", "TMPDIR=/scratch"} <= set(listed)


def test_setpriv_never_sees_what_the_loader_obeys() -> None:
    words = options(SEALED)

    assert "--clearenv" in words
    assert not {"LD_PRELOAD", "TMPDIR"} & set(words)
    assert command(SEALED).index("LD_PRELOAD=/opt/x.so") > command(SEALED).index(TOOLS.env)


@pytest.mark.parametrize("name", ["A=B", "=", "-"])
def test_a_command_that_env_would_take_for_something_else_goes_through_a_shell(name: str) -> None:
    assert command(a_plan(argv=(name, "x y")))[-5:] == ["/bin/sh", "-c", 'exec "$0" "$@"', name, "x y"]


@pytest.mark.parametrize("words", [("true",), ("-x", "--", "-y"), ("sh", "-c", ""), ("a", "b=c")])
def test_any_other_is_handed_on_word_by_word(words: tuple[str, ...]) -> None:
    plan = a_plan(argv=words)

    assert tuple(command(plan)[-len(words) - 2 :]) == ("--", f"PWD={plan.cwd}", *words)


def test_the_payload_starts_in_the_working_directory_or_where_it_is_told() -> None:
    assert "--chdir=/home/ann/work/src" in command(SEALED)
    assert "--chdir=/home/ann/work" in command(a_plan(cwd="/home/ann/work"))


def test_pwd_says_where_the_payload_starts_unless_it_was_given() -> None:
    given = a_plan(cwd="/home/ann/work", environment={"PWD": "/elsewhere"})

    assert "PWD=/home/ann/work/src" in command(SEALED)
    assert "PWD=/home/ann/work" in command(a_plan(cwd="/home/ann/work"))
    assert [word for word in command(given) if word.startswith("PWD=")] == ["PWD=/elsewhere"]
