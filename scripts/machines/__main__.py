"""`scripts/vm`: test machines of Debian packages alone."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.machines import box, cache, images, matrix, qemu
from scripts.machines.definitions import EXTRAS, HOSTS, KERNELS
from scripts.machines.failure import NoMachine
from scripts.machines.furnish import CHECKOUT
from scripts.machines.images import Machine

_TIMEOUT_S = 1800


def main() -> int:
    arguments = _arguments()
    # So that whatever was started is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return int(arguments.does(arguments))
    except NoMachine as error:
        if error.output:
            print(error.output, file=sys.stderr)
        print(f"vm: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  hint: {error.hint}", file=sys.stderr)
        return error.exit_status


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/vm", description="Boot test machines with systemd and a kernel of their own.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="boot a machine, run a command in its copy of the checkout, power off")
    _add_machine(run)
    run.add_argument(
        "--timeout", type=float, default=_TIMEOUT_S, metavar="SECONDS", help=f"end the machine then, status 124 ({_TIMEOUT_S})"
    )
    run.add_argument("--results", type=Path, metavar="DIR", help="where output, console, journal and JUnit XML go (build/vm/MACHINE)")
    run.add_argument("--reboots", action="store_true", help="a reboot is one: the command runs again then, on the same disk")
    run.add_argument("argv", nargs="+", metavar="COMMAND", help="run as root in /sealnet; pytest and sealnet are on its PATH")
    run.set_defaults(does=_run)

    build = commands.add_parser("build", help="make a machine's images, unless they are there")
    _add_machine(build)
    build.add_argument("--fresh", action="store_true", help="make them again, from today's packages")
    build.set_defaults(does=_build)

    shell = commands.add_parser("shell", help="a machine's console as root; `poweroff` or ^A x ends it")
    _add_machine(shell)
    shell.set_defaults(does=_shell)

    packing = commands.add_parser("box", help="pack a machine as a box for Vagrant's libvirt provider, see docs/vagrant.md")
    packing.add_argument("--host", choices=HOSTS, default="bookworm", help="userland, with its own kernel (bookworm)")
    packing.set_defaults(does=_box)

    table = commands.add_parser("matrix", help="the smoke suite on every machine of the matrix; all of them write docs/compatibility.md")
    table.add_argument("cells", nargs="*", metavar="MACHINE", help="only these, as bookworm-6.1; then nothing is written")
    table.add_argument("--timeout", type=float, default=_TIMEOUT_S, metavar="SECONDS", help=f"for each ({_TIMEOUT_S})")
    table.add_argument("--brief", action="store_true", help="only the first test of each promise; then nothing is written either")
    table.add_argument("--again", action="store_true", help="run a few failed tests once more, in a machine that has just booted")
    table.set_defaults(does=_matrix)

    listing = commands.add_parser("list", help="hosts, kernels, what they can be had with, and which images are there")
    listing.set_defaults(does=_list)
    return parser.parse_args()


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", choices=HOSTS, default="bookworm", help="userland (bookworm)")
    parser.add_argument("--kernel", choices=KERNELS, default="6.1", help="kernel (6.1)")
    parser.add_argument(
        "--with", dest="extras", choices=EXTRAS, action="append", default=[], metavar="EXTRA", help="see `scripts/vm list`; repeatable"
    )


def _machine(arguments: argparse.Namespace) -> Machine:
    return Machine(arguments.host, arguments.kernel, tuple(arguments.extras))


def _run(arguments: argparse.Namespace) -> int:
    machine = _machine(arguments)
    results = arguments.results or CHECKOUT / "build" / "vm" / machine.name
    ended = qemu.run(
        images.kernel(machine.kernel),
        images.root_disk(machine),
        arguments.argv,
        results=results,
        timeout_s=arguments.timeout,
        output=sys.stdout.buffer,
        reboots=arguments.reboots,
    )
    print(
        f"vm: {machine.name}: status {ended.status}, up in {ended.up_s:.0f} s, off after {ended.took_s:.0f} s: {results}", file=sys.stderr
    )
    return ended.status


def _build(arguments: argparse.Namespace) -> int:
    machine = _machine(arguments)
    print(images.kernel(machine.kernel, fresh=arguments.fresh).kernel.parent)
    print(images.root_disk(machine, fresh=arguments.fresh).parent)
    return 0


def _shell(arguments: argparse.Namespace) -> int:
    machine = _machine(arguments)
    return qemu.shell(images.kernel(machine.kernel), images.root_disk(machine))


def _box(arguments: argparse.Namespace) -> int:
    print(box.pack(arguments.host, CHECKOUT / "dist"))
    return 0


def _matrix(arguments: argparse.Namespace) -> int:
    mark = "brief" if arguments.brief else "smoke"
    rows = matrix.run(matrix.cells_named(arguments.cells), mark=mark, timeout_s=arguments.timeout, again=arguments.again)
    print(f"\n{matrix.aligned(rows)}")
    if not arguments.cells and not arguments.brief:
        matrix.PAGE.write_text(matrix.render(rows, matrix.facts()), encoding="utf-8")
        print(f"\nwritten: {matrix.PAGE}")
    # One that was asked for by name must have been there.
    return 0 if all(row.is_green or (row.is_absent and not arguments.cells) for row in rows) else 1


def _list(_arguments: argparse.Namespace) -> int:
    rows: list[Sequence[str]] = [("--host", name, " ".join(source.suite for source in host.sources)) for name, host in HOSTS.items()]
    rows += [("--kernel", name, " ".join(source.suite for source in kernel.sources)) for name, kernel in KERNELS.items()]
    rows += [("--with", name, extra.about) for name, extra in EXTRAS.items()]
    for option, name, about in rows:
        print(f"{option:<9} {name:<16} {about}")
    print(f"\nin {cache.root()}:")
    for made in sorted(cache.root().glob("*@*")):
        print(f"  {made.name}")
    return 0


sys.exit(main())
