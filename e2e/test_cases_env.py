"""Field cases of the client's environment: what a host has set, how clients spell it, and clients that ask nobody."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import LAN_PEER, SEALNET, Host, wait_for
from tests.upstream import PUBLIC, Upstream

pytestmark = [pytest.mark.root, pytest.mark.tool("curl", "openssl", "node", "wget", "git")]

ALLOWED = ("--allow", "allowed.test", "--allow", "allowed.test:80")
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
OWN = "localhost,127.0.0.1,::1"
_FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode(), end=str())"
PYTHON = f"python3 -c '{_FETCH}'"
_ASK = "import socket, sys; s = socket.socket(type=2); s.connect((sys.argv[1], 53)); s.settimeout(5); s.send(bytes(9)); s.recv(9)"
_NODE = "fetch(process.argv[1]).then(r => r.text()).then(console.log, e => { console.log(e.cause.code); process.exit(1) })"
NODE = f"node -e '{_NODE}'"


@pytest.fixture
def upstream(host: Host) -> Iterator[Upstream]:
    made = Upstream(host)
    yield made
    # Nobody but the door asks for names, and for declared ones only.
    assert set(made.questions()) <= {"allowed.test"}


def run(host: Host, script: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return host.sealnet("run", *options, "--", "sh", "-c", script, env={**os.environ, "PATH": SYSTEM_PATH, **variables})


def variables_of(text: str) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in text.rstrip("\0").split("\0"))


def proxies(text: str) -> dict[str, str]:
    """Whatever speaks of one, but for where the test stands and what it is called."""
    ours = ("PWD", "PYTEST_CURRENT_TEST")
    return {name: value for name, value in variables_of(text).items() if name not in ours and "proxy" in f"{name} {value}".lower()}


INHERITED = {
    "no_proxy": "*",
    "NO_PROXY": "10.0.0.0/8,.test",
    "No_Proxy": "evil.test",
    "all_proxy": f"http://{LAN_PEER}:80",
    "ftp_proxy": f"http://{LAN_PEER}:80",
    "npm_config_noproxy": "evil.test",
    "http_proxy": f"http://{LAN_PEER}:80",
    "HTTPS_PROXY": f"http://{LAN_PEER}:80",
}


def test_an_inherited_no_proxy_is_not_the_runs(host: Host, upstream: Upstream) -> None:
    """ENV-01, https://github.com/curl/curl/issues/9773, https://github.com/seanmonstar/reqwest/issues/2579,
    https://github.com/dotnet/runtime/issues/61840"""
    script = f"curl -fsS http://HOST/a; wget -q -t 1 -O - http://HOST/b; {PYTHON} http://HOST/c"

    for passed in ((), ("--pass-env", "*roxy*", "--pass-env", "*ROXY*")):
        told = proxies(run(host, "env -0", *ALLOWED, *passed, **INHERITED).stdout)
        assert told.pop("JAVA_TOOL_OPTIONS").startswith("-Dhttp.proxyHost=198.18.0.1 ")
        url = told["http_proxy"]
        assert url.startswith("http://198.18.0.1:")
        ours = {**dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), url), "NODE_USE_ENV_PROXY": "1"}
        assert told == {**ours, "NO_PROXY": OWN, "no_proxy": OWN}
        upstream.forget()
        allowed = run(host, script.replace("HOST", "allowed.test"), *ALLOWED, *passed, **INHERITED)
        evil = run(host, script.replace("HOST", "evil.test"), *ALLOWED, *passed, **INHERITED)
        assert (allowed.returncode, allowed.stdout) == (0, "/a/b/c"), allowed.stderr
        assert (evil.returncode, evil.stdout) == (1, ""), evil.stderr
        assert evil.stderr.count("403") >= 2, evil.stderr
        assert upstream.connections() == 3


@pytest.mark.parametrize(
    ("given", "upper", "lower"),
    [
        ({"NO_PROXY": "a.test, .b.test"}, f"a.test,.b.test,{OWN}", f"a.test,.b.test,{OWN}"),
        ({"no_proxy": "*"}, f"*,{OWN}", "*"),
        ({"NO_PROXY": "*", "no_proxy": "a.test"}, f"*,a.test,{OWN}", "*"),
        ({"NO_PROXY": "a.test,*"}, f"a.test,*,{OWN}", "*"),
    ],
)
def test_what_is_asked_for_is_not_proxied_and_the_seal_refuses_it(
    host: Host, upstream: Upstream, given: dict[str, str], upper: str, lower: str
) -> None:
    """ENV-01, https://github.com/curl/curl/issues/9773: who obeys a `*` gets nowhere, for there is no way but the proxy."""
    options = [word for name, value in given.items() for word in ("--setenv", f"{name}={value}")]

    told = proxies(run(host, "env -0", *ALLOWED, *options).stdout)
    done = run(host, f"curl -sS -m 3 http://allowed.test/a; {PYTHON} http://allowed.test/c", *ALLOWED, *options)

    assert (told["NO_PROXY"], told["no_proxy"]) == (upper, lower)
    assert (done.stdout == "") == (lower == "*"), (done.stdout, done.stderr)
    assert run(host, "curl -fsS http://allowed.test/a", *ALLOWED).stdout == "/a"


def test_a_payload_without_a_proxy_has_no_variable_of_one(host: Host, upstream: Upstream) -> None:
    """ENV-01, https://github.com/curl/curl/issues/9773"""
    host.broker(8080, "127.0.0.1")
    given = {**INHERITED, "NODE_USE_ENV_PROXY": "1", "JAVA_TOOL_OPTIONS": "-Dhttp.proxyHost=corp"}

    for options in ((), ("--broker", "tcp:127.0.0.1:8080"), ("--broker", "tcp:127.0.0.1:8080", "--pass-env", "*")):
        told = proxies(run(host, "env -0", *options, **given).stdout)
        told.pop("JAVA_TOOL_OPTIONS", None)
        assert told == {}, options
    assert proxies(run(host, "env -0", *ALLOWED, **given).stdout)["no_proxy"] == OWN


def test_both_spellings_are_set_and_each_request_is_written_down(host: Host, upstream: Upstream) -> None:
    """ENV-02, https://github.com/curl/curl/issues/12120, https://github.com/RakuenSoftware/aimee/pull/2553"""
    script = f"""
        curl -fsS http://allowed.test/a
        {PYTHON} http://allowed.test/b
        wget -q -t 1 -O - http://allowed.test/c
        git clone -q http://allowed.test/git/demo.git d && cat d/README
        python3 -m pip download -q --disable-pip-version-check --no-cache-dir --no-deps --retries 0 --trusted-host allowed.test \
            --index-url http://allowed.test/simple/ -d w sealdemo && ls w
        for spelling in http_proxy HTTP_PROXY https_proxy HTTPS_PROXY; do printenv $spelling >>spellings; done
    """

    done = run(host, script, *ALLOWED, "--evidence", "evidence")

    assert (done.returncode, done.stdout) == (0, "/a/b/ccloned\nsealdemo-1.0-py3-none-any.whl\n"), done.stderr
    assert len(set(Path("spellings").read_text().splitlines())) == 1
    (log,) = Path("evidence").glob("*.egress.jsonl")
    # pip: the index and the wheel; git: refs, the list of what there is, and the objects.
    assert len(log.read_text().splitlines()) == upstream.connections() == 3 + 3 + 2


def test_clients_that_ask_nobody_fail_at_once(host: Host, upstream: Upstream) -> None:
    """ENV-04, https://github.com/nodejs/undici/issues/1650, https://github.com/Shopify/ucp-cli/pull/37,
    https://github.com/NVIDIA/OpenShell/pull/675"""
    host.broker(8081)
    knock = "python3 -c 'import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)'"
    deeds = {
        "node": f"{NODE} http://192.0.2.77/",
        "node to the host": f"{NODE} http://{PUBLIC}/",
        "raw": f"{knock} 192.0.2.77 443",
        "raw to the host": f"{knock} {PUBLIC} 80",
        "gateway": f"{knock} 198.18.0.1 1",
        "gateway's other port": f"{knock} 198.18.0.1 8081",
        "name": "getent hosts allowed.test",
        "dns": f"python3 -c '{_ASK}' {LAN_PEER}",
    }
    script = "\n".join(
        f'began=$(date +%s%3N); ({deed}) >said 2>&1; echo "$?|$(($(date +%s%3N) - began))|{name}|$(tail -n 1 said)"'
        for name, deed in deeds.items()
    )

    done = run(host, f"{script}\ncurl -fsS http://allowed.test/a", *ALLOWED, "--evidence", "evidence")

    *told, control = done.stdout.splitlines()
    assert control == "/a"
    assert len(told) == len(deeds), done.stderr
    for status, took_ms, name, said in (line.split("|", 3) for line in told):
        assert status != "0", (name, said)
        assert "imed out" not in said, (name, said)
        assert "ETIMEDOUT" not in said, (name, said)
        # The time-outs of these are 5 and 10 seconds, and that of a TCP connection two minutes.
        assert int(took_ms) < 4500, (name, took_ms, said)
    assert upstream.connections() == 1
    # The control: who is on the host has all of it.
    host.run("curl", "-fsS", "--noproxy", "*", f"http://{PUBLIC}/a")


PASSWORDS = ["http://u:S3CR3T@corp:3128", "u:S3CR3T@corp:3128", "http:/u:S3CR3T@corp", "HTTP://U%40:S3CR3T@corp"]


def _told_of(host: Host, own: int) -> Iterator[tuple[str, bytes]]:
    """What there is of a run to be read: argv and environment of every process but the caller's own, and all of its state."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("cmdline", "environ"):
            path = Path(f"/proc/{pid}/{name}")
            try:
                found = path.read_bytes()
            except OSError:
                continue
            if not (int(pid) in (own, os.getpid()) and name == "environ"):
                yield str(path), found
    for path in host.state.rglob("*"):
        if path.is_file():
            yield str(path), path.read_bytes()


@pytest.mark.parametrize("url", PASSWORDS, ids=itertools.count())
def test_the_password_of_the_hosts_proxy_is_nowhere(host: Host, upstream: Upstream, url: str) -> None:
    """ENV-05, https://github.com/microsoft/mxc/pull/798"""
    names = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "npm_config_https_proxy")
    variables: dict[str, Any] = {**os.environ, **dict.fromkeys(names, url), "KNOWN": "W0RD", "PATH": SYSTEM_PATH}
    script = "env; curl -fsS http://allowed.test/a; echo; curl -sS http://evil.test/; echo; echo ready >ready; sleep 60"
    options = (*ALLOWED, "--pass-env", "*", "--evidence", "evidence", "--receipt", "receipt.json", "--report")
    process = host.spawn(*SEALNET, "run", "--run-id", "env-doors", *options, "--", "sh", "-c", script, env=variables)
    wait_for(lambda: Path("ready").exists(), what="the payload has asked", timeout_s=20)

    found = list(_told_of(host, process.pid))
    host.sealnet("reap", "env-doors")
    process.wait(60)
    said = [("stdout", process.stdout.read().encode()), ("stderr", process.stderr.read().encode())]
    said += [(str(path), path.read_bytes()) for path in (*Path("evidence").iterdir(), Path("receipt.json"))]

    assert [where for where, data in (*found, *said) if b"S3CR3T" in data] == []
    # The control: what may pass is seen at both of these places.
    assert b"W0RD" in dict(said)["stdout"]
    assert any(b"W0RD" in data for where, data in found if where.endswith("/environ"))
    assert b"/a" in dict(said)["stdout"]
