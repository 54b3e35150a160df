"""Other tools that run a command cut off from the network: how to get them, how to call them, and the proof that they did it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SRT = "@anthropic-ai/sandbox-runtime"
_SRT_VERSION = "0.0.83"
_CNI = "/usr/lib/cni"
_INSTALL_S = 300


class Missing(Exception):
    """A peer cannot be measured here; the text is why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A command that a payload is appended to."""

    name: str
    argv: tuple[str, ...]
    version: str

    def command(self, *payload: str) -> list[str]:
        return [*self.argv, *payload]


def install_srt(cache: Path) -> None:
    """Fetch the rootless peer from npm, once. Needs the machine's own network, so it comes before the throw-away host."""
    if shutil.which("npm") is None:
        raise Missing("npm is not installed")
    if _srt_manifest(cache).get("version") == _SRT_VERSION:
        return
    cache.mkdir(mode=0o755, parents=True, exist_ok=True)
    command = [
        "npm",
        "install",
        "--silent",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--prefix",
        str(cache),
        f"{_SRT}@{_SRT_VERSION}",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as e:
        raise Missing(f"npm install did not end within {_INSTALL_S} s") from e
    if done.returncode or not _srt_manifest(cache):
        raise Missing(f"npm install failed: {_last(done.stderr or done.stdout)}")


def _srt_manifest(cache: Path) -> dict[str, str]:
    try:
        return dict(json.loads((cache / "node_modules" / _SRT / "package.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def srt(cache: Path) -> Peer:
    node = _found("node")
    cli = cache / "node_modules" / _SRT / "dist" / "cli.js"
    if not cli.exists():
        raise Missing("it is not installed")
    for tool in ("bwrap", "socat", "rg"):
        _found(tool)
    return _proved(Peer("sandbox-runtime (srt)", (node, str(cli)), f"{_SRT_VERSION}, node {_version(node)}"))


def firejail() -> Peer:
    path = _found("firejail")
    return _proved(Peer("firejail --net=none", (path, "--quiet", "--noprofile", "--net=none"), _version(path)))


def bwrap(option: str) -> Peer:
    path = _found("bwrap")
    argv = (path, option, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc")
    return _proved(Peer(f"bwrap {option}", argv, _version(path)))


def _proved(peer: Peer) -> Peer:
    """It is only a peer if what it ran was cut off: in another network namespace, with status 0."""
    try:
        done = subprocess.run(
            peer.command("readlink", "/proc/self/ns/net"), capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as e:
        raise Missing("it did not end within 60 s") from e
    if done.returncode:
        raise Missing(f"status {done.returncode}: {_last(done.stderr or done.stdout)}")
    if not done.stdout.strip().endswith("]") or done.stdout.strip() == os.readlink("/proc/self/ns/net"):
        raise Missing(f"it did not cut its command off: {_last(done.stdout)}")
    return peer


class Ptp:
    """CNI's point-to-point plugin: ADD and DEL of one namespace, as a container runtime would call it."""

    def __init__(self, directory: Path) -> None:
        for plugin in ("ptp", "host-local"):
            if not os.access(f"{_CNI}/{plugin}", os.X_OK):
                raise Missing(f"{_CNI}/{plugin} is not installed")
        ipam = {"type": "host-local", "subnet": "203.0.113.0/24", "dataDir": str(directory / "cni")}
        self._config = json.dumps({"cniVersion": "0.4.0", "name": "bench", "type": "ptp", "ipMasq": False, "ipam": ipam})

    def call(self, verb: str, netns: str) -> None:
        environment = {
            **os.environ,
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": "bench",
            "CNI_NETNS": netns,
            "CNI_IFNAME": "eth0",
            "CNI_PATH": _CNI,
        }
        done = subprocess.run([f"{_CNI}/ptp"], input=self._config, env=environment, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise Missing(f"ptp {verb} failed: {_last(done.stdout or done.stderr)}")


def _found(tool: str) -> str:
    path = shutil.which(tool)
    if path is None:
        raise Missing(f"{tool} is not installed")
    return path


def _version(*command: str) -> str:
    said = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout.split()
    return next((word for word in said if any(char.isdigit() for char in word)), "?")


def _last(text: str) -> str:
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"
