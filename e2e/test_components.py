"""sealnet beside the programs that people have on their hosts: nginx and its clients, docker, firewalld, tmux, socat."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import LAN_HOST, LAN_PEER, PATIENCE, SEALNET, Host, Probe, end, wait_for

pytestmark = pytest.mark.root

SEALED = ("--lease-port", "8080")
BROKER = "http://broker.sealnet:8080"
# The machine may have another client first on its PATH.
DOCKER = "/usr/bin/docker"

_NGINX = """
daemon off;
master_process off;
user root;
pid {prefix}/pid;
error_log {prefix}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log {prefix}/access.log;
    client_body_temp_path {prefix}/body;
    proxy_temp_path {prefix}/proxy;
    fastcgi_temp_path {prefix}/fastcgi;
    uwsgi_temp_path {prefix}/uwsgi;
    scgi_temp_path {prefix}/scgi;
    server {{ listen 8080; listen [::]:8080; root {prefix}/www; }}
    server {{ listen 8081; root {prefix}/www; }}
}}
"""

# All may own and send everything: the only client is the test.
_BUS = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path=/run/dbus/system_bus_socket</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/><allow own="*"/><allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/>
  </policy>
</busconfig>
"""


def sealed(host: Host, *command: str, user: str = "root", options: tuple[str, ...] = SEALED) -> subprocess.CompletedProcess[str]:
    return host.sealnet("run", *options, "--user", user, "--chdir", "/", "--setenv", "HOME=/tmp", "--", *command)


@pytest.fixture
def nginx(host: Host) -> Path:
    """nginx on ports 8080 and 8081, with a file, a big file and a git repository; its directory."""
    prefix = host.directory / "nginx"
    (prefix / "www").mkdir(parents=True)
    (prefix / "nginx.conf").write_text(_NGINX.format(prefix=prefix))
    (prefix / "www" / "hello").write_text("hello from nginx")
    (prefix / "www" / "big").write_bytes(os.urandom(16 << 20))
    work = prefix / "work"
    git = ("git", "-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "init.defaultBranch=main", "-C", str(work))
    work.mkdir()
    host.run(*git, "init", "-q")
    (work / "file").write_text("in the repository")
    host.run(*git, "add", "file")
    host.run(*git, "commit", "-q", "-m", "first")
    host.run("git", "clone", "-q", "--bare", str(work), str(prefix / "www" / "repository.git"))
    host.run("git", "-C", str(prefix / "www" / "repository.git"), "update-server-info")
    server = host.spawn("/usr/sbin/nginx", "-p", str(prefix), "-c", str(prefix / "nginx.conf"), "-e", str(prefix / "error.log"))
    wait_for(lambda: host.run("curl", "-fsS", "http://127.0.0.1:8080/hello", check=False).returncode == 0 or server.poll() is not None)
    assert server.poll() is None, server.stderr and server.stderr.read()
    return prefix


_CLIENTS = {
    "curl": ("curl", "-sS", "{url}/hello"),
    "python": (
        "/usr/bin/python3",
        "-c",
        "import sys, urllib.request as r; print(r.urlopen(sys.argv[1] + '/hello').read().decode(), end='')",
        "{url}",
    ),
    "node": ("node", "-e", "require('http').get(process.argv[1] + '/hello', (r) => r.pipe(process.stdout))", "{url}"),
    "node fetch": ("node", "-e", "fetch(process.argv[1] + '/hello').then((r) => r.text()).then((t) => process.stdout.write(t))", "{url}"),
    "git": ("sh", "-c", "git clone -q {url}/repository.git /tmp/clone && cat /tmp/clone/file"),
}


@pytest.mark.tool("nginx", "curl", "node", "git")
@pytest.mark.parametrize("client", _CLIENTS)
def test_clients_reach_nginx_through_the_lease_alone(host: Host, nginx: Path, client: str) -> None:
    """ENV-04, https://github.com/nodejs/undici/issues/1650"""
    expected = "in the repository" if client == "git" else "hello from nginx"

    def command(url: str) -> list[str]:
        return [word.format(url=url) for word in _CLIENTS[client]]

    for user in ("root", "1234"):
        done = sealed(host, *command(BROKER), user=user)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr
    for url in ("http://broker.sealnet:8081", f"http://{LAN_HOST}:8080", "http://no-such-host.test:8080"):
        began = time.monotonic()
        other = sealed(host, *command(url), user="1234")
        assert other.returncode not in (0, 124, 125)
        assert expected not in other.stdout
        assert time.monotonic() - began < 10 * PATIENCE
    # Both ports answer whoever is not sealed.
    assert host.in_lan("curl", "-fsS", f"http://{LAN_HOST}:8080/hello", f"http://{LAN_HOST}:8081/hello").stdout == "hello from nginx" * 2
    log = [line for line in (nginx / "access.log").read_text().splitlines() if line.startswith("198.18.")]
    assert len(log) >= 2
    assert not [line for line in log if " 404 " in line and "git" not in line]


@pytest.mark.tool("nginx", "curl")
def test_a_big_answer_arrives_whole(host: Host, nginx: Path) -> None:
    """HTTP-07, https://github.com/rhobuild/runpool/pull/38"""
    wanted = hashlib.sha256((nginx / "www" / "big").read_bytes()).hexdigest()

    done = sealed(host, "sh", "-c", f"curl -fsS {BROKER}/big | sha256sum", user="1234")

    assert done.stdout.split()[0] == wanted


@pytest.mark.tool("socat")
def test_a_stream_goes_both_ways_and_ends_by_halves(host: Host) -> None:
    """HTTP-07, https://github.com/kpdyer/fteproxy/pull/234"""
    host.spawn("socat", "TCP-LISTEN:8080,fork,reuseaddr", "SYSTEM:sha256sum")
    wait_for(lambda: "8080" in host.run("ss", "-Hltn").stdout)
    wanted = hashlib.sha256(bytes(8 << 20)).hexdigest()

    # sha256sum answers only after the end of what it is sent.
    done = sealed(host, "sh", "-c", "head -c 8388608 /dev/zero | socat -t 30 - TCP:broker.sealnet:8080", user="1234")

    assert done.stdout.split()[:1] == [wanted], done.stderr


# docker


@contextlib.contextmanager
def dockerd(host: Host, *options: str) -> Iterator[None]:
    """A docker daemon of this host's own, with an image `box` that serves a page."""
    group = f"sealnet-test-{os.getpid()}"
    log = (host.directory / "dockerd.log").open("w")
    daemon = host.spawn(
        "/usr/sbin/dockerd",
        *("--storage-driver", "vfs", "--data-root", str(host.directory / "docker"), "--exec-root", "/run/docker-exec"),
        *("--host", "unix:///run/docker.sock", "--pidfile", "/run/docker.pid"),
        *("--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", f"/{group}", *options),
        stdout=log,
        stderr=log,
        env={**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    try:
        wait_for(
            lambda: host.run(DOCKER, "version", check=False).returncode == 0 or daemon.poll() is not None,
            timeout_s=40,
            what="dockerd is up",
        )
        assert daemon.poll() is None, Path(log.name).read_text()[-2000:]
        root = host.directory / "image"
        (root / "bin").mkdir(parents=True)
        (root / "www").mkdir()
        shutil.copy("/bin/busybox", root / "bin" / "busybox")
        (root / "www" / "index.html").write_text("from the container")
        host.run("sh", "-c", f"tar -C {root} -c . | {DOCKER} import - box")
        yield
    finally:
        host.run("sh", "-c", f"{DOCKER} ps -aq | xargs -r {DOCKER} rm -f", check=False)
        end(daemon)
        log.close()
        for path in Path("/sys/fs/cgroup").glob(f"*/{group}"):
            path.rmdir()


def publish(host: Host, name: str, port: int) -> str:
    """A container with its port 80 published; its address."""
    host.run(DOCKER, "run", "-d", "--name", name, "-p", f"{port}:80", "box", "/bin/busybox", "httpd", "-f", "-p", "80", "-h", "/www")
    wait_for(lambda: host.in_lan("curl", "-fsS", "-m", "3", f"http://{LAN_HOST}:{port}/", check=False).stdout == "from the container")
    # The bridge's own IPv6 address comes late and brings routes.
    wait_for(lambda: host.run("ip", "-6", "addr", "show", "dev", "docker0", "scope", "link", "-tentative").stdout)
    return host.run(DOCKER, "inspect", "-f", "{{.NetworkSettings.IPAddress}}", name).stdout.strip()


@pytest.mark.tool("dockerd", "busybox")
@pytest.mark.parametrize("proxy", ["true", "false"], ids=["userland proxy", "DNAT alone"])
def test_a_port_that_docker_publishes_answers_the_lan_and_no_run(host: Host, proxy: str) -> None:
    """PF-05, https://github.com/moby/moby/issues/14041"""
    host.broker(8080)
    before = host.probe_run("docker-before", *SEALED)
    with dockerd(host, f"--userland-proxy={proxy}"):
        address = publish(host, "web", 9999)

        # The container answers the LAN and the host.
        assert host.in_lan("curl", "-fsS", f"http://{LAN_HOST}:9999/").stdout == "from the container"
        assert host.probe().ask(("tcp", address, 80), ("tcp", LAN_HOST, 9999)) == ["answered"] * 2
        assert host.probe_inside("docker-before").ask(("tcp", gateway_of(host, "docker-before"), 8080)) == ["answered"]
        assert_lease_alone(host, "docker-before", before, address)
        assert before.end() == 0

        host.settled()
        after = host.probe_run("docker-after", *SEALED, "--user", "1234", "--chdir", "/")
        assert_lease_alone(host, "docker-after", after, address)
        # Nor does the daemon itself.
        daemon = sealed(host, "curl", "-sS", "-m", "3", "--unix-socket", "/run/docker.sock", "http://docker/version")
        assert daemon.returncode == 7
        assert '"Version"' in host.run("curl", "-fsS", "--unix-socket", "/run/docker.sock", "http://docker/version").stdout
        assert after.end() == 0
        # A broker in a container is one like any other where docker-proxy listens for it on the host. DNAT alone applies to no leased flow.
        publish(host, "broker", 8082)
        broker = sealed(host, "curl", "-sS", "-m", "2", "http://broker.sealnet:8082/", options=("--lease-port", "8082"))
        assert ("from the container" in broker.stdout) == (proxy == "true")
        assert (broker.returncode == 0) == (proxy == "true")
        host.run(DOCKER, "rm", "-f", "broker")
        host.assert_clean()
    host.settled()


def gateway_of(host: Host, run_id: str) -> str:
    recorded = host.record(run_id)
    assert recorded is not None
    return str(recorded["gateway"])


def assert_lease_alone(host: Host, run_id: str, run: Probe, container: str) -> None:
    """Nothing of docker's answers the run, nor one in its namespace with every capability and no filter: the gate alone is left then."""
    gateway = gateway_of(host, run_id)
    targets = [(gateway, 9999), (LAN_HOST, 9999), (container, 80), (container, 9999), ("172.17.0.1", 9999)]
    targets = [("tcp", address, port) for address, port in targets]
    assert run.ask(("tcp", gateway, 8080)) == ["answered"]
    assert "answered" not in run.ask(*targets)

    host.unattended(run_id)
    host.inside(run_id, "nft", "flush", "ruleset")
    host.inside(run_id, "ip", "route", "del", "default", "dev", "lo")
    host.inside(run_id, "ip", "route", "add", "default", "via", gateway)
    inside = host.probe_inside(run_id)
    assert inside.ask(("tcp", gateway, 8080)) == ["answered"]
    assert set(inside.ask(*targets)) <= {"ECONNREFUSED", "ETIMEDOUT"}


# firewalld


@pytest.fixture
def firewalld(host: Host) -> Iterator[None]:
    """firewalld on a message bus of its own; nothing of the machine's configuration is read or written."""
    os.mkdir("/run/dbus", 0o755)
    os.mkdir("/run/firewalld", 0o755)
    bus_file = host.directory / "bus.conf"
    bus_file.write_text(_BUS)
    bus = host.spawn("dbus-daemon", "--nofork", "--nopidfile", "--nosyslog", "--config-file", str(bus_file))
    wait_for(lambda: os.path.exists("/run/dbus/system_bus_socket"))
    configuration = host.directory / "firewalld"
    configuration.mkdir()
    shutil.copy("/etc/firewalld/firewalld.conf", configuration)
    log = host.directory / "firewalld.log"
    daemon = host.spawn(
        *("/usr/sbin/firewalld", "--nofork", "--nopid", "--log-file", str(log), "--system-config", str(configuration)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: host.run("firewall-cmd", "--state", check=False).returncode == 0 or daemon.poll() is not None, timeout_s=40)
    assert daemon.poll() is None, log.read_text()
    yield
    end(daemon)
    end(bus)
    host.settled()


@pytest.mark.tool("firewalld", "dbus-daemon")
def test_firewalld_that_drops_is_named_and_a_reload_opens_nothing(host: Host, firewalld: None) -> None:
    """PF-09, https://github.com/firewalld/firewalld/issues/742"""
    host.broker(8080)
    host.broker(8081)
    refused = sealed(host, "true")
    host.run("firewall-cmd", "--permanent", "--add-port", "8080-8081/tcp")
    host.run("firewall-cmd", "--reload")
    host.settled()
    run = host.probe_run("firewall", *SEALED)
    gateway = gateway_of(host, "firewall")

    host.run("firewall-cmd", "--reload")
    rules = host.run("nft", "-a", "list", "table", "inet", "firewalld").stdout

    assert refused.returncode == 125
    assert "table inet firewalld, chain filter_IN_public drops it (reject)" in refused.stderr
    assert "hint: let it in: sealnet host install --lease-port 8080 --reload" in refused.stderr
    assert "inet firewalld" in host.run("nft", "list", "tables").stdout
    assert host.probe_lan().ask(("tcp", LAN_HOST, 8081)) == ["answered"]
    assert run.ask(("tcp", gateway, 8080), ("tcp", gateway, 8081)) == ["answered", "ECONNREFUSED"]
    assert host.sealnet("check", "firewall").returncode == 0
    assert run.end() == 0
    assert host.run("nft", "-a", "list", "table", "inet", "firewalld").stdout == rules
    assert host.left_over() == []


@pytest.fixture
def etc(host: Host) -> None:
    """An /etc of the test's own over the machine's: what is written there is gone with the throw-away host."""
    for name in ("upper", "work"):
        os.makedirs(f"/run/etc/{name}")
    host.run("mount", "-t", "overlay", "-o", "lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work", "etc", "/etc")


@pytest.mark.tool("firewalld", "firewall-offline-cmd", "dbus-daemon")
def test_the_zone_of_host_install_lets_in_its_ports_and_no_others(host: Host, etc: None, firewalld: None) -> None:
    """PF-09, and what the hint of a refused run says is what lets it in."""
    host.run("mount", "--bind", str(host.directory / "firewalld"), "/etc/firewalld")
    host.broker(8080)
    host.broker(8081)
    host.run("firewall-cmd", "--set-default-zone", "drop")
    host.settled()
    refused = sealed(host, "true")
    hint = refused.stderr.partition("hint: let it in: sealnet ")[2].split()

    installed = host.sealnet(*hint, "--json")
    host.settled()
    run = host.probe_run("zone", *SEALED)
    other = sealed(host, "true", options=("--lease-port", "8081"))
    # The gate is what keeps the run from the broker's neighbours, and the zone holds without it.
    host.unattended("zone")
    host.run("nft", "delete", "table", "inet", "sealnet")
    host.inside("zone", "nft", "flush", "ruleset")
    bare = host.probe_inside("zone").ask(*(("tcp", gateway_of(host, "zone"), port) for port in (8080, 8081)))

    assert (refused.returncode, hint) == (125, ["host", "install", "--lease-port", "8080", "--reload"])
    assert "table inet firewalld, chain filter_IN_drop drops it" in refused.stderr
    reloads = {one["manager"]: one["state"] for one in json.loads(installed.stdout)["reload"]}
    assert (installed.returncode, reloads["firewalld"]) == (0, "reloaded"), installed.stderr
    assert run.ask(("tcp", gateway_of(host, "zone"), 8080)) == ["answered"]
    assert (other.returncode, "chain filter_IN_sealnet drops it (reject)" in other.stderr) == (125, True), other.stderr
    assert bare == ["answered", "EHOSTUNREACH"]
    # firewalld's own parser has no complaint, and its tools see the zone as it was meant.
    host.run("firewall-offline-cmd", "--check-config")
    told = host.run("firewall-cmd", "--zone", "sealnet", "--list-all").stdout
    assert all(
        line in told
        for line in ("target: %%REJECT%%", "interfaces: seal+", "ports: 8080/tcp 29400-29407/tcp", "services: \n", "forward: no")
    )
    host.run("firewall-offline-cmd", "--zone", "sealnet", "--query-interface", "seal+")
    assert run.end() == 0

    removed = host.sealnet("host", "remove", "--reload")
    host.settled()
    assert "removed       /etc/firewalld/zones/sealnet.xml" in removed.stdout
    assert "chain filter_IN_drop drops it" in sealed(host, "true").stderr


@pytest.mark.tool("firewalld", "dbus-daemon", "curl")
def test_doors_are_let_in_by_the_zone_of_host_install(host: Host, etc: None, firewalld: None) -> None:
    """Each run's doors listen at the same few ports of its own gateway; what the hint of a refused run says is what lets them in."""
    host.run("mount", "--bind", str(host.directory / "firewalld"), "/etc/firewalld")
    with Path("/etc/hosts").open("a") as hosts:
        hosts.write(f"{LAN_PEER} lan.test\n")
    host.broker(8080, "127.0.0.1")
    host.broker(8080, netns="lan")
    host.broker(8081)
    host.run("firewall-cmd", "--set-default-zone", "drop")
    host.settled()
    relay, allowed = ("--broker", "tcp:127.0.0.1:8080"), ("--allow-private", "lan.test:8080")

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return host.sealnet("run", *options, "--", "sh", "-c", "curl -fsS ${SEALNET_BROKER_URL:-http://lan.test:8080}/x")

    refused = [run(*options) for options in (relay, allowed)]
    hints = {each.stderr.partition("hint: let it in: sealnet ")[2].strip() for each in refused}
    installed = host.sealnet("host", "install", "--reload")
    host.settled()
    passed = [run(*options) for options in (relay, allowed)]
    runs = [host.spawn_run(f"both-{number}", "sh", options=relay + allowed, stdin=subprocess.PIPE) for number in range(2)]
    for each in runs:
        assert each.stdin is not None
        each.stdin.write("curl -fsS $SEALNET_BROKER_URL/a; curl -fsS http://lan.test:8080/b\n")
    records = [host.record(f"both-{number}") or {} for number in range(2)]
    said = [each.communicate(timeout=90)[0] for each in runs]
    leased = sealed(host, "true", options=("--lease-port", "8081"))

    assert [each.returncode for each in refused] == [125, 125]
    assert hints == {"host install --reload"}
    assert all("table inet firewalld, chain filter_IN_drop drops it" in each.stderr for each in refused)
    assert installed.returncode == 0, installed.stderr
    assert "ports: 29400-29407/tcp" in host.run("firewall-cmd", "--zone", "sealnet", "--list-all").stdout
    assert [(each.returncode, each.stdout) for each in passed] == [(0, "/x"), (0, "/x")], passed
    assert said == ["/a/b", "/a/b"]
    assert [record["lease_ports"] for record in records] == [[29400, 29401], [29400, 29401]]
    assert records[0]["gateway"] != records[1]["gateway"]
    assert (leased.returncode, "chain filter_IN_sealnet drops it (reject)" in leased.stderr) == (125, True), leased.stderr


# systemd


@contextlib.contextmanager
def networkd(host: Host) -> Iterator[None]:
    """systemd-networkd of this host's own, by itself: no bus, no udev."""
    for name in ("", "links", "leases", "lldp"):
        os.makedirs(f"/run/systemd/netif/{name}", exist_ok=True)
        shutil.chown(f"/run/systemd/netif/{name}", "systemd-network", "systemd-network")
    log = (host.directory / "networkd.log").open("w")
    # With /sys read-only it waits for no udev (systemd's container interface).
    script = "mount -t sysfs -o ro sysfs /sys && exec /lib/systemd/systemd-networkd"
    daemon = host.spawn("unshare", "-m", "sh", "-c", script, stdout=log, stderr=log)
    try:
        wait_for(lambda: os.path.exists("/run/systemd/netif/state") or daemon.poll() is not None, what="networkd is up")
        assert daemon.poll() is None, Path(log.name).read_text()
        yield
    finally:
        end(daemon)
        log.close()


def networkd_says(host: Host, link: str) -> str:
    """What networkd has noted of a link."""
    note = Path(f"/run/systemd/netif/links/{json.loads(host.run('ip', '-j', 'link', 'show', link).stdout)[0]['ifindex']}")
    return note.read_text() if note.exists() else ""


@pytest.mark.tool("networkctl")
def test_networkd_leaves_the_links_of_runs_alone_once_it_is_told(host: Host, etc: None) -> None:
    """A run whose link networkd has taken is broken, and says so; with the file of `host install` beside the same networkd it is not."""
    host.broker(8080)
    directory = Path("/etc/systemd/network")
    for path in directory.glob("*"):
        path.unlink()
    (directory / "80-all.network").write_text("[Match]\nName=seal* other0\n\n[Network]\nAddress=10.99.0.1/24\nLinkLocalAddressing=no\n")

    def addresses(link: str) -> str:
        return host.run("ip", "-br", "-4", "addr", "show", "dev", link).stdout

    # The run first: on a slow machine networkd would have the link before it is proved, and the run would be refused.
    run = host.probe_run("taken", *SEALED)
    link = host.wait_running("taken")["ifname"]
    with networkd(host):
        wait_for(lambda: "10.99.0.1" in addresses(link), what="networkd takes the link")
        taken = host.sealnet("check", "taken")
        assert run.end() == 0

    installed = host.sealnet("host", "install")
    with networkd(host):
        host.run("ip", "link", "add", "other0", "type", "veth", "peer", "name", "other1")
        host.run("ip", "link", "set", "other1", "up")
        run = host.probe_run("left-alone", *SEALED)
        link = host.wait_running("left-alone")["ifname"]
        wait_for(lambda: "10.99.0.1" in addresses("other0"), what="networkd takes the other link")
        wait_for(lambda: "ADMIN_STATE=unmanaged" in networkd_says(host, link), what="networkd has seen the link")
        left_alone = host.sealnet("check", "left-alone")
        shown = addresses(link)
        assert run.end() == 0
    host.run("ip", "link", "del", "other0")

    assert (taken.returncode, "10.99.0.1" in taken.stdout) == (1, True)
    assert "new           /etc/systemd/network/00-sealnet.network" in installed.stdout
    assert (left_alone.returncode, "10.99.0.1" in shown) == (0, False), left_alone.stdout


@pytest.mark.tool("udevadm")
def test_udev_runs_nothing_for_the_links_of_runs_and_leaves_their_names(host: Host, etc: None) -> None:
    """udev's own rules and its parser, by `udevadm test`, which runs no program."""
    host.run("ip", "link", "add", "sealaaaaaaaaaaa", "type", "veth", "peer", "name", "other0")
    command = "mount -t sysfs sysfs /sys && exec udevadm test --action=add /sys/class/net/$1"

    def told(link: str) -> tuple[str, str]:
        done = host.run("unshare", "-m", "sh", "-c", command, "sh", link)
        return done.stdout, done.stderr

    before, _said = told("sealaaaaaaaaaaa")
    installed = host.sealnet("host", "install")
    after, said = told("sealaaaaaaaaaaa")
    other, _said = told("other0")
    host.run("ip", "link", "del", "other0")

    # How it tells them differs between versions: 252 says `run: '...'`, later ones `RUN{program} : ...`.
    assert "new           /etc/udev/rules.d/99-zz-sealnet.rules" in installed.stdout
    assert "systemd-sysctl" in before
    assert "systemd-sysctl" in other
    assert "systemd-sysctl" not in after
    assert all(word in after for word in ("/bin/true", "NM_UNMANAGED=1", "SYSTEMD_READY=0", "00-sealnet.link"))
    assert not any(word in before + other for word in ("/bin/true", "SYSTEMD_READY=0", "00-sealnet.link"))
    assert not [line for line in said.splitlines() if "sealnet.rules" in line and ("nvalid" in line or "ignoring" in line)]


# tmux


def tmux_server(host: Host, tmux: tuple[str, ...]) -> None:
    """A server with one session. tmux 3.3 loses the one that it has just started once in thirty times."""
    wait_for(lambda: host.run(*tmux, "new-session", "-d", "-s", "other", "sleep 600", check=False).returncode == 0, what="a tmux server")


@pytest.mark.tool("tmux")
@pytest.mark.parametrize("how", ["kill-pane", "kill-server"])
def test_a_pane_that_is_closed_ends_its_run(host: Host, how: str) -> None:
    """PROC-09, https://github.com/containers/bubblewrap/issues/726"""
    tmux = ("tmux", "-S", "/run/tmux.sock", "-f", "/dev/null")
    nap = f"4323.{os.getpid()}"
    command = (*SEALNET, "run", "--run-id", "tmux-pane", "--", "sh", "-c", f"trap '' HUP; echo re''ady; setsid sleep {nap} & sleep {nap}")
    tmux_server(host, tmux)
    host.run(*tmux, "new-session", "-d", "-s", "test", "-x", "100", "-y", "30", *command)
    wait_for(lambda: "ready" in host.run(*tmux, "capture-pane", "-p", "-t", "test", check=False).stdout, what="it runs")
    recorded: dict[str, Any] = host.wait_running("tmux-pane")
    assert os.path.exists(f"/proc/{recorded['pid']}")

    host.run(*tmux, *(("kill-pane", "-t", "test") if how == "kill-pane" else ("kill-server",)), check=False)

    wait_for(lambda: host.record("tmux-pane") is None, timeout_s=5, what="the run is gone")
    assert nap not in host.run("ps", "-eo", "args").stdout.replace(f"setsid sleep {nap} & sleep {nap}", "")
    host.run(*tmux, "kill-server", check=False)
    wait_for(lambda: host.run(*tmux, "list-sessions", check=False).returncode != 0)


@pytest.mark.tool("tmux")
def test_the_size_of_a_pane_is_the_size_in_the_run(host: Host) -> None:
    """PROC-08, https://github.com/TNG/oh-my-agentic-coder/pull/12"""
    tmux = ("tmux", "-S", "/run/tmux.sock", "-f", "/dev/null")
    script = "trap 'stty size' WINCH; stty size; while :; do sleep 0.05; done"
    command = (*SEALNET, "run", "--run-id", "tmux-size", "--", "bash", "-c", script)
    tmux_server(host, tmux)
    host.run(*tmux, "new-session", "-d", "-s", "test", "-x", "100", "-y", "30", *command)

    def shown() -> list[str]:
        return host.run(*tmux, "capture-pane", "-p", "-t", "test", check=False).stdout.split("\n")

    wait_for(lambda: any(line.endswith(" 100") for line in shown()), what="the first size")
    host.run(*tmux, "resize-window", "-t", "test", "-x", "120", "-y", "40")

    wait_for(lambda: any(line.endswith(" 120") for line in shown()), what="the second size")
    assert json.loads(host.sealnet("ls", "--json").stdout)[0]["run_id"] == "tmux-size"
    host.run(*tmux, "kill-server", check=False)
    wait_for(lambda: host.record("tmux-size") is None, timeout_s=10, what="the run is gone")
