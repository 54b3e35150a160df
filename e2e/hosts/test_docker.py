"""dockerd: a published port and a network of one's own, and the daemon's restart."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest

from e2e.hosts.machine import ETH0, Machine, wait_for
from tests.lab import LAN_HOST

pytestmark = [pytest.mark.tool("dockerd", "busybox")]

_SERVE = ("box", "/bin/busybox", "httpd", "-f", "-vvv", "-p", "80", "-h", "/")
_PUBLISHED = 9999


@contextlib.contextmanager
def docker(machine: Machine) -> Iterator[dict[str, str]]:
    """Two containers, one on a network of its own, both with a published port; their addresses."""
    with machine.undoing("systemctl stop docker.socket containerd"), machine.unit("docker"):
        try:
            root = machine.directory / "image"
            (root / "bin").mkdir(parents=True)
            shutil.copy("/bin/busybox", root / "bin" / "busybox")
            machine.run("sh", "-c", f"tar -C {root} -c . | docker import - box")
            machine.run("docker", "network", "create", "--subnet", "172.30.0.0/24", "own")
            for number, (name, network) in enumerate((("web", "bridge"), ("other", "own"))):
                machine.run("docker", "run", "-d", "--restart", "always", "--name", name, "--network", network,
                            "-p", f"{_PUBLISHED - number}:80", *_SERVE)  # fmt: skip
            yield addresses(machine)
        finally:
            machine.run("docker", "rm", "-f", "web", "other", check=False)
            machine.run("docker", "network", "rm", "own", check=False)


def addresses(machine: Machine) -> dict[str, str]:
    form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    return {name: machine.run("docker", "inspect", "-f", form, name).stdout.strip() for name in ("web", "other")}


def connected(machine: Machine) -> int:
    """How often somebody connected to one of the containers, by what they write down."""
    told = [machine.run("docker", "logs", name) for name in ("web", "other")]
    return sum((one.stdout + one.stderr).count("connected") for one in told)


def test_published_ports_answer_the_lan_and_no_run_through_a_restart_of_docker(machine: Machine) -> None:
    with docker(machine) as found:

        def reached() -> None:
            before = connected(machine)
            for number in range(2):
                url = f"http://{LAN_HOST}:{_PUBLISHED - number}/"
                answer = ("curl", "-sS", "-m", "5", "-o", "/dev/null", url)
                wait_for(
                    lambda answer=answer: machine.in_lan(*answer, check=False).returncode == 0, timeout_s=60, what=f"the LAN reaches {url}"
                )
            wait_for(lambda: connected(machine) >= before + 2, what="the containers write down who comes")

        machine.control()
        reached()
        before, known = machine.looks(), connected(machine)
        own = [(*found.values(),), ("172.17.0.1", "172.30.0.1")]
        targets = [("tcp", address, 80) for address in own[0]]
        targets += [("tcp", address, _PUBLISHED - n) for address in ("198.18.0.1", LAN_HOST, ETH0, *own[1]) for n in range(2)]
        live = machine.live("beside-docker", targets=tuple(targets))
        live.still()

        for verb in ("restart", "stop", "start"):
            machine.run("systemctl", verb, "docker")
            live.sealed()
        wait_for(lambda: set(addresses(machine).values()) == set(found.values()), timeout_s=60, what="the containers are back")
        live.still()
        after = connected(machine)

        assert live.refused() == []
        assert after == known
        reached()
        machine.control()
        live.end()
        machine.same(before)
