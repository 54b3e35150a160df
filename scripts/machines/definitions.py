"""The machines: userlands, kernels, what else may stand on them, and which of them the matrix takes."""

from __future__ import annotations

from dataclasses import dataclass, field

MAIN, SECURITY = "debian", "debian-security"


@dataclass(frozen=True)
class Source:
    """One suite of one of Debian's archives."""

    archive: str
    suite: str


@dataclass(frozen=True)
class Host:
    """A userland. Its packages come from the newest of its sources."""

    name: str
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Kernel:
    """A kernel: that of the newest of its sources, whatever userland it comes from."""

    name: str
    sources: tuple[Source, ...]
    package: str = "linux-image-cloud-amd64"


@dataclass(frozen=True)
class Extra:
    """What a host has besides: packages, units, files. `links`: it brings up eth0 itself."""

    name: str
    about: str
    packages: tuple[str, ...] = ()
    # Packages that exist in some releases only.
    packages_of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    enabled: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    # Run in the image, each an argv.
    commands: tuple[tuple[str, ...], ...] = ()
    links: bool = False


@dataclass(frozen=True)
class Cell:
    """One row of the matrix."""

    host: str
    kernel: str


_BOOKWORM = (Source(MAIN, "bookworm"), Source(MAIN, "bookworm-updates"), Source(SECURITY, "bookworm-security"))
_TRIXIE = (Source(MAIN, "trixie"), Source(MAIN, "trixie-updates"), Source(SECURITY, "trixie-security"))
_SID = (Source(MAIN, "sid"),)

HOSTS = {
    host.name: host
    for host in (
        Host("bookworm", _BOOKWORM),
        Host("trixie", _TRIXIE),
        Host("sid", _SID),
    )
}

KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("5.10", (Source(MAIN, "bullseye"), Source(SECURITY, "bullseye-security"))),
        Kernel("6.1", _BOOKWORM),
        Kernel("6.12", _TRIXIE),
        Kernel("sid", _SID),
    )
}

# What a test needs that a run does not. In every image, and small.
TOOLS = (
    "busybox-static", "ca-certificates", "curl", "gcc", "git", "iptables", "iputils-ping", "libc6-dev", "openssl", "socat", "sqlite3",
    "strace", "tmux", "udev", "wget",
)  # fmt: skip

EXTRAS = {
    extra.name: extra
    for extra in (
        Extra("docker", "dockerd, enabled", packages=("docker.io",), packages_of={"trixie": ("docker-cli",), "sid": ("docker-cli",)}),
        Extra("podman", "podman with netavark", packages=("podman", "netavark", "aardvark-dns", "crun")),
        Extra("firewalld", "firewalld, enabled", packages=("firewalld",)),
        Extra(
            "ufw",
            "ufw, enabled, incoming denied",
            packages=("ufw",),
            enabled=("ufw.service",),
            commands=(("sed", "-i", "s/^ENABLED=.*/ENABLED=yes/", "/etc/ufw/ufw.conf"),),
        ),
        Extra(
            "networkd",
            "systemd-networkd, enabled, DHCP on eth0",
            enabled=("systemd-networkd.service",),
            files={"/etc/systemd/network/50-eth0.network": "[Match]\nName=eth0\n\n[Network]\nDHCP=ipv4\n"},
            links=True,
        ),
        Extra("networkmanager", "NetworkManager, enabled, DHCP on eth0", packages=("network-manager",), links=True),
        Extra("resolved", "systemd-resolved, enabled", packages=("systemd-resolved",)),
        Extra(
            "libvirt",
            "libvirtd with its default network, virbr0",
            packages=("libvirt-daemon-system", "libvirt-clients", "libvirt-daemon-config-network", "dnsmasq-base"),
            commands=(
                ("mkdir", "-p", "/etc/libvirt/qemu/networks/autostart"),
                ("ln", "-sf", "/etc/libvirt/qemu/networks/default.xml", "/etc/libvirt/qemu/networks/autostart/default.xml"),
            ),
        ),
        Extra(
            "iptables-legacy",
            "iptables means iptables-legacy",
            packages=("iptables",),
            commands=(("update-alternatives", "--set", "iptables", "/usr/sbin/iptables-legacy"),),
        ),
        Extra("nftables", "nftables.service, enabled: a reload flushes the ruleset", enabled=("nftables.service",)),
        Extra("buildah", "buildah and runc", packages=("buildah", "runc")),
        Extra(
            "dependencies",
            "what the Debian package depends on beside what is there",
            packages=("python3-click", "python3-h11", "python3-psutil", "python3-pyroute2", "python3-rich"),
        ),
        Extra(
            "managers",
            "all that manages links or filters, none of it enabled: e2e/hosts starts one at a time; AppArmor is on",
            packages=(
                "apparmor",
                "dnsmasq-base",
                "docker.io",
                "firewalld",
                "libvirt-clients",
                "libvirt-daemon-config-network",
                "libvirt-daemon-system",
                "network-manager",
                "ufw",
                "wireguard-tools",
            ),
            packages_of={"trixie": ("docker-cli",), "sid": ("docker-cli",)},
            commands=(
                (
                    "systemctl",
                    "disable",
                    "NetworkManager.service",
                    "containerd.service",
                    "docker.service",
                    "docker.socket",
                    "firewalld.service",
                    "libvirtd-admin.socket",
                    "libvirtd-ro.socket",
                    "libvirtd.service",
                    "libvirtd.socket",
                    "ufw.service",
                    "virtlockd.socket",
                    "virtlogd.socket",
                ),
                ("systemctl", "mask", "libvirt-guests.service"),
            ),
        ),
        Extra("nodejs", "node", packages=("nodejs",)),
        Extra("nginx", "nginx, not enabled", packages=("nginx-light",), commands=(("systemctl", "disable", "nginx.service"),)),
    )
}

MATRIX = (
    Cell("bookworm", "5.10"),
    Cell("bookworm", "6.1"),
    Cell("bookworm", "6.12"),
    Cell("trixie", "6.12"),
    Cell("sid", "sid"),
)
# The one that scripts/test boots.
LANE = Cell("bookworm", "6.1")
