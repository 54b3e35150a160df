"""A build's command lines: pinned word for word, which words of a caller's pass, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from sealnet.errors import UsageError
from sealnet.model import buildargv, environment
from sealnet.model.argv import Fds
from sealnet.model.buildargv import Tools, checked
from tests.golden import assert_golden, lines_of

GOLDEN = Path(__file__).with_name("golden")
FDS = Fds(args=11, info=12, status=13, block=14, alive=15, seccomp=16)
TOOLS = Tools(
    sh="/usr/bin/sh",
    bwrap="/usr/bin/bwrap",
    setsid="/usr/bin/setsid",
    setpriv="/usr/bin/setpriv",
    buildah="/usr/bin/buildah",
    runc="/usr/sbin/runc",
)
WORDS = (
    "--root",
    "/srv/store",
    "-t",
    "localhost/app",
    "--build-arg",
    "VERSION=3",
    "-f",
    "Containerfile",
    "--no-cache",
    "--layers=false",
    ".",
)
CHECKED = checked(WORDS, cwd="/home/ann/app")
PROXIED = environment.proxied(buildargv.VARIABLES, host="198.18.0.1", port=3128, exempt=["198.18.0.1", "broker.sealnet"])
VARIABLES = environment.sealed(PROXIED, run_id="run-1", broker_url="http://198.18.0.1:8080", broker_env=())


def test_a_callers_words_are_made_plain() -> None:
    assert CHECKED == (
        "--root=/srv/store",
        "--tag=localhost/app",
        "--build-arg=VERSION=3",
        "--file=/home/ann/app/Containerfile",
        "--no-cache",
        "--layers=false",
        "/home/ann/app",
    )


def test_the_whole_command_line_is_pinned() -> None:
    command = buildargv.render_command(CHECKED, FDS, VARIABLES, TOOLS, controlling_terminal=True)
    options = buildargv.render_options("/run/sealnet/stage/root", "/run/sealnet/stage/dev1", FDS, VARIABLES, die_with_parent=True)

    assert_golden(GOLDEN / "build.txt", lines_of(command))
    assert_golden(GOLDEN / "build-options.txt", lines_of(options))


def test_what_is_sealnets_own_stands_in_every_command_line_whatever_the_words() -> None:
    bare = buildargv.render_command(("/context",), FDS, buildargv.VARIABLES, TOOLS, controlling_terminal=False)
    full = buildargv.render_command(CHECKED, FDS, VARIABLES, TOOLS, controlling_terminal=False)

    for command in (bare, full):
        builder = command[command.index(TOOLS.buildah) :]
        assert {"--isolation=oci", "--network=host", "--cgroupns=private", "--http-proxy=false", "--runtime=/usr/sbin/runc"} <= {*builder}
        assert {"--userns-uid-map=0:1879048192:65536", "--userns-gid-map=0:1879048192:65536"} <= {*builder}
        assert {"--cap-drop=CAP_NET_ADMIN", "--cap-drop=CAP_NET_RAW"} <= {*builder}
        assert builder[-2] == "--"
    assert not [word for word in bare if environment.is_proxy(word) and word != "--http-proxy=false"]


def test_what_is_shown_is_what_a_build_reads() -> None:
    words = checked(["-f", "/srv/files/Containerfile", "--authfile", "/etc/x/auth.json", "--root", "/s", "."], cwd="/w")

    assert buildargv.shown(words) == ["/etc/x", "/srv/files", "/w"]
    assert buildargv.store(words) == "/s"
    assert buildargv.store(["/w"]) == "/var/lib/containers/storage"


def test_the_bounding_set_has_nothing_that_changes_a_network() -> None:
    for name, bit in {"NET_ADMIN": 12, "NET_RAW": 13, "SYS_MODULE": 16, "SYS_RAWIO": 17, "BPF": 39}.items():
        assert not buildargv.BOUNDING >> bit & 1
        assert name not in buildargv.CAPABILITIES
    dropped = buildargv.render_command(("/c",), FDS, {}, TOOLS, controlling_terminal=False)
    words = next(word for word in dropped if word.startswith("--bounding-set=")).partition("=")[2].split(",")
    assert {word[1:].upper() for word in words}.isdisjoint(buildargv.CAPABILITIES)
    # linux/capability.h: 41 of them up to CAP_CHECKPOINT_RESTORE.
    assert len(words) + len(buildargv.CAPABILITIES) == 41


@pytest.mark.parametrize(
    "word",
    [
        "--network=host", "--net=none", "--isolation=chroot", "--cap-add=NET_ADMIN", "--cap-drop=ALL", "--device=/dev/net/tun",
        "--security-opt=seccomp=unconfined", "--userns=host", "--userns-uid-map=0:0:1", "--add-host=a:1.2.3.4", "--dns=1.1.1.1",
        "--dns-search=x", "--cni-plugin-path=/x", "--cni-config-dir=/x", "--volume=/:/host", "-v=/:/host", "-v", "--runtime=/x",
        "--runtime-flag=x", "--http-proxy=true", "--http-proxy", "--cgroupns=host", "--cgroup-parent=/x", "--ipc=host", "--pid=host",
        "--uts=host", "--ssh=default", "--secret=id=x,src=/etc/shadow", "--storage-opt=x", "--build-context=a=/etc", "--env=http_proxy=x",
        "--decryption-key=x", "--hooks-dir=/x", "--no-hosts", "--registries-conf=/x", "--signature-policy=/x",
        # What nobody knows yet, an abbreviation, words run together, the end of options.
        "--invented", "--tagx=1", "--ta=x", "-tname", "-qt", "--",
    ],
)  # fmt: skip
def test_a_word_that_could_undo_it_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match=r"^cannot use \S+ in a sealed build: "):
        checked([word, "."], cwd="/w")
    assert checked(["-t", "name", "."], cwd="/w") == ("--tag=name", "/w")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no context directory"),
        (["a", "b"], "more than one context directory"),
        (["-t"], "-t has no value"),
        (["--layers=perhaps", "."], "it is true or false"),
        (["--build-arg", "TOKEN", "."], "it must be NAME=VALUE"),
        (["--build-arg", "HTTPS_proxy=http://x", "."], "a build's proxy is the run's own"),
        (["https://example.com/x.tar"], "it must be a path on this host"),
        (["git@example.com:x.git"], "it must be a path on this host"),
        (["GitHub.com/a/b"], "it must be a path on this host"),
        (["-"], "it must be a path on this host"),
        (["-f", "-", "."], "it must be a path on this host"),
        (["-f", "http://x/Dockerfile", "."], "it must be a path on this host"),
        (["-t", "a\0b", "."], "a NUL byte"),
        (["a\0b"], "a NUL byte"),
    ],
)
def test_a_request_that_is_none_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        checked(words, cwd="/w")


def test_a_value_that_looks_like_an_option_stays_a_value() -> None:
    assert checked(["--label", "--network=host", "/c"], cwd="/w") == ("--label=--network=host", "/c")
