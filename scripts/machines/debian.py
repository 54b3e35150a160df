"""Debian's packages, through the archives that this machine's own apt uses."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.machines.definitions import MAIN, SECURITY, Host, Kernel, Source
from scripts.machines.failure import NoMachine, NotHere

_DEFAULT = {archive: f"http://deb.debian.org/{archive}" for archive in (MAIN, SECURITY)}
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# How this machine reaches an archive, as opposed to what it fetches from there.
_ACQUIRE = re.compile(r"^Acquire::(?:https?::|ForceIPv|Retries|Check-Valid-Until|Check-Date|Proxy).* \"[^\"]+\";$")
_KERNEL_PART = re.compile(r"^\s*Depends: (linux-(?:base|binary|image|modules)-\S+)$", re.MULTILINE)
_OUTPUT_LINES = 40


def run(argv: Sequence[str | Path], *, doing: str, cwd: Path | None = None, text: str | None = None) -> str:
    """The command's standard output. Raises NoMachine `cannot <doing>` with the end of what it said."""
    env = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    try:
        done = subprocess.run(argv, cwd=cwd, env=env, input=text or "", capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise NoMachine(f"cannot {doing}: {argv[0]}: {error.strerror}") from error
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-_OUTPUT_LINES:])
        raise NoMachine(f"cannot {doing}: {Path(argv[0]).name} ended with status {done.returncode}", output=said)
    return done.stdout


def archives() -> dict[str, str]:
    """The address of each archive, as this machine's apt has it; else the public one."""
    found = dict(_DEFAULT)
    told = run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"], doing="read apt's sources")
    for line in reversed(told.splitlines()):
        address = line.rstrip("/")
        if (name := address.rpartition("/")[2]) in found:
            found[name] = address
    return found


def sources_list(sources: Sequence[Source]) -> str:
    known = archives()
    return "".join(f"deb [signed-by={_KEYRING}] {known[source.archive]} {source.suite} main\n" for source in sources)


def _acquire() -> list[str]:
    told = run(["apt-config", "dump"], doing="read apt's configuration")
    return [line for line in told.splitlines() if _ACQUIRE.match(line)]


def unpack_host(host: Host, packages: Sequence[str], into: Path) -> None:
    """A userland with these packages and what they need, configured, in the directory.

    mmdebstrap, not debootstrap: it takes packages of several suites at once, so that nothing is installed twice.
    """
    options = ['APT::Sandbox::User "root"', 'APT::Install-Recommends "false"', 'Acquire::Languages "none"', *_acquire()]
    # Whatever it mounts and starts goes with it, also when it is killed.
    isolated = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc")
    run(
        [*isolated, "mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory", *(f"--aptopt={option}" for option in options),
         f"--include={','.join(packages)}", host.sources[0].suite, into, "-"],
        doing=f"make host {host.name}",
        text=sources_list(host.sources),
    )  # fmt: skip


def unpack_kernel(kernel: Kernel, into: Path) -> None:
    """The newest kernel of its sources, unpacked in the directory, with a busybox of the same sources beside it. Nothing is installed."""
    apt = into / "apt"
    for below in ("lists/partial", "cache/archives/partial"):
        (apt / below).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(sources_list(kernel.sources), encoding="utf-8")
    (apt / "options").write_text(
        f'Dir::Etc::SourceList "{apt}/sources.list";\nDir::Etc::SourceParts "/dev/null";\nDir::State::Lists "{apt}/lists";\n'
        f'Dir::State::Status "{apt}/status";\nDir::Cache "{apt}/cache";\nAPT::Sandbox::User "root";\nAcquire::Languages "none";\n',
        encoding="utf-8",
    )
    doing = f"fetch kernel {kernel.name}"
    # apt's helpers want a directory that anybody may write to; this one is enough for root's.
    command: list[str | Path] = ["env", f"TMPDIR={apt}", "apt-get", "-c", apt / "options", "--quiet"]
    try:
        run([*command, "update"], doing=doing)
        wanted = list(_parts(kernel, apt / "options"))
    except NoMachine as error:
        suites = ", ".join(source.suite for source in kernel.sources)
        raise NotHere(f"cannot fetch kernel {kernel.name}: this machine's archives do not serve {suites}", output=error.output) from error
    run([*command, "download", *wanted[1:], "busybox-static"], doing=doing, cwd=apt)
    for archive in apt.glob("*.deb"):
        run(["dpkg-deb", "--extract", archive, into], doing=doing)


def _parts(kernel: Kernel, options: Path) -> Iterator[str]:
    """The package and those that the files of the kernel are in: newer releases split them."""
    waiting, seen = [kernel.package], set[str]()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        told = run(["apt-cache", "-c", str(options), "depends", "--important", name], doing=f"find kernel {kernel.name}")
        yield name
        waiting += [found for found in _KERNEL_PART.findall(told) if found not in seen and found not in waiting]
