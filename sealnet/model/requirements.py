"""What a host must have to seal, judged: one row each."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sealnet.model.facts import WORKS, Facts, Feature, Row, Tool

# As `uname -m` names them; sealnet.kernel.seccomp refuses the others.
MACHINES = ("x86_64", "aarch64")
_SUDO = "sudo sealnet doctor"
_PRIVILEGED = "run on the host, or in a privileged container"

# cgroup.kill is of 5.14; before it a cgroup is frozen and its processes are killed one by one.
_OLDEST, _CGROUP_KILL = (5, 10), (5, 14)


def requirements(facts: Facts) -> Iterator[Row]:
    """Each requirement, found or not, and what mends it."""
    yield _kernel(facts.release)
    if facts.machine not in MACHINES:
        yield _refused(
            "architecture", f"{facts.machine}, and the system-call policy is written for {' and '.join(MACHINES)}", "another machine"
        )
    yield from _features(facts)
    if facts.modules_disabled:
        yield Row(
            name="kernel modules",
            status="note",
            found="loading is disabled until the next boot (kernel.modules_disabled)",
            does="uses what is loaded",
        )
    yield from map(_tool, facts.tools)
    yield _privileges(facts)
    yield from _confined(facts)
    yield from _limits(facts)
    if facts.config_fault:
        yield _refused("configuration", facts.config_fault, "correct the file")
    yield _state(facts)


def version(text: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version; empty where it begins with none."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def _kernel(release: str) -> Row:
    number = version(release)[:2]
    if number < _OLDEST:
        return Row(name="kernel", status="warn", found=f"Linux {release}", does="was written for 5.10 and later", fix="boot a newer kernel")
    if number < _CGROUP_KILL:
        return Row(
            name="kernel",
            status="note",
            found=f"Linux {release}, without cgroup.kill (5.14)",
            does="freezes a run's cgroup and kills its processes one by one",
        )
    return Row(name="kernel", status="ok", found=f"Linux {release}")


def _features(facts: Facts) -> Iterator[Row]:
    for feature in facts.features:
        if feature.found:
            yield Row(name=feature.name, status="ok", found=WORKS)
        elif feature.found is None:
            yield Row(name=feature.name, status="note", found=feature.said, fix="" if facts.root else _SUDO)
        else:
            yield _refused(feature.name, feature.said or "missing", _bring(feature, facts))


def _refused(name: str, found: str, fix: str) -> Row:
    return Row(name=name, status="fail", found=found, does="refuses every run", fix=fix)


def _bring(feature: Feature, facts: Facts) -> str:
    if not feature.module:
        return "boot a kernel that has it"
    if facts.container:
        return f"on the host, outside of this container: modprobe {feature.module}"
    if facts.modules_disabled:
        return f"have {feature.module} loaded at boot: modules cannot be loaded any more (kernel.modules_disabled)"
    if facts.modules == "of another kernel":
        return f"reboot: {feature.module} cannot be loaded, the modules on disk are of another kernel than the running {facts.release}"
    if facts.modules == "none":
        return f"boot a kernel that has {feature.module}: there is no module of the running one on disk"
    return f"modprobe {feature.module}"


def _tool(tool: Tool) -> Row:
    if tool.path is None:
        return _refused(tool.name, "missing", f"apt-get install {tool.package}")
    found = f"{tool.version} ({tool.path})" if tool.version else tool.path
    if tool.needed and tool.version and version(tool.version) < version(tool.needed):
        return _refused(tool.name, f"{found}, needed {tool.needed}", f"install a newer {tool.package}")
    return Row(name=tool.name, status="ok", found=found)


def _privileges(facts: Facts) -> Row:
    if not facts.root and facts.has_worker:
        return Row(name="privileges", status="note", found="not root", does="has the worker seal")
    if not facts.root:
        return Row(name="privileges", status="fail", found="not root", does="only root may build a seal", fix=_SUDO)
    if facts.lacking:
        return _refused("privileges", f"this root lacks {' and '.join(facts.lacking)}", _PRIVILEGED)
    return Row(name="privileges", status="ok", found="root with CAP_NET_ADMIN and CAP_SYS_ADMIN")


def _confined(facts: Facts) -> Iterator[Row]:
    if facts.sysctls_writable is False:
        yield _refused("/proc/sys/net", "read-only, and a link must be made quiet", _PRIVILEGED)
    if facts.container:
        yield Row(
            name="container",
            status="note",
            found=f"nested in one ({facts.container})",
            does="has what that grants, and the throw-away seal shows whether it is enough",
        )


def _limits(facts: Facts) -> Iterator[Row]:
    name, limit = "network namespaces allowed", facts.max_net_namespaces
    if limit is not None:
        fix = "sysctl user.max_net_namespaces=65536"
        if limit == 0:
            yield _refused(name, "none", fix)
        elif limit < facts.max_runs:
            found = f"{limit}, and max_runs is {facts.max_runs}"
            yield Row(name=name, status="warn", found=found, does="refuses the runs beyond", fix=fix)
        else:
            yield Row(name=name, status="ok", found=str(limit))
    if facts.max_user_namespaces is not None:
        yield Row(name="user namespaces allowed", status="ok", found=f"{facts.max_user_namespaces}; none is needed but for --allow-userns")


def _state(facts: Facts) -> Row:
    if facts.state_fault:
        return _refused("state directory", f"{facts.state_path}: {facts.state_fault}", facts.state_fix)
    return Row(name="state directory", status="ok", found=facts.state_path)
