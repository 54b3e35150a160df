"""What the worker is asked for a run, and the files that we write of it with our own rights."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sealnet import client
from sealnet.client import Connection, RemoteRun
from sealnet.errors import CannotSeal, SealnetError, UsageError
from sealnet.model import calling, environment, policy
from sealnet.model import plan as plans
from sealnet.model.view import cwd_is_bound

if TYPE_CHECKING:
    from sealnet.kernel.output import Directory, Output


def reach(where: str, *, always: bool, is_configured: bool) -> Connection | None:
    """The worker whose socket is at `where`; or None where there is none, or none that lets us in, or we have a configuration of our own.

    Raises UsageError or CannotSeal: it must be there, and is not.
    """
    if is_configured:
        if always:
            raise UsageError(
                "cannot use --worker always with $SEALNET_CONFIG: the worker has a configuration of its own", hint="unset SEALNET_CONFIG"
            )
        return None
    try:
        return Connection(where)
    except OSError as error:
        # Who could not do it alone is told why the worker does not.
        if always or isinstance(error, TimeoutError) or (os.geteuid() != 0 and not isinstance(error, FileNotFoundError)):
            raise client.unreachable(where, error) from error
        return None


def parameters(argv: Sequence[str], given: dict[str, Any], **more: Any) -> tuple[int, dict[str, Any]]:
    """The payload's uid, and what is asked. The run has its id from us: if we lose the worker, we can ask the next one by it."""
    from sealnet import caller
    from sealnet.kernel import owncode, process

    if not argv:
        raise UsageError("cannot run: no command was given", hint="sealnet run [OPTIONS] -- COMMAND [ARG]...")
    given.setdefault("run_id", caller.new_run_id())
    inherited: Mapping[str, str] | None = given.pop("environ", None)
    if inherited is None:
        inherited = os.environ
    user = process.user(given["user"]) if given.get("user") is not None else caller.default_user(inherited)
    given["user"] = str(user.uid)
    given.setdefault("cwd", caller.working_directory())
    options = {name: value for name, value in given.items() if value is not None and name != "cwd"}
    if os.geteuid() == 0:
        # The worker knows where its own code lies, and this may be another installation, which root runs next.
        writable = [plans.bind(text, writable=True, cwd=given["cwd"]).source for text in given.get("bind") or ()]
        owncode.require_not_in([os.path.realpath(source) for source in writable])
        here = os.path.realpath(given["cwd"])
        if cwd_is_bound(here) and owncode.is_own_code(here):
            options["share_cwd"] = False
    variables = environment.handed_on(inherited, tuple(given.get("pass_env") or ()))
    return user.uid, calling.render(argv, options, cwd=given["cwd"], environ=variables, **more)


@contextlib.contextmanager
def opened_paths(given: Mapping[str, Any]) -> Iterator[list[int]]:
    """The working directory and each source, opened: what the worker finds under their names must be these."""
    with contextlib.ExitStack() as held:
        found = []
        for option, text in (
            (None, given["cwd"]),
            *(("--ro-bind", text) for text in given.get("ro_bind") or ()),
            *(("--bind", text) for text in given.get("bind") or ()),
        ):
            path = text if option is None else plans.bind(text, writable=option == "--bind", cwd=given["cwd"]).source
            try:
                found.append(os.open(path, os.O_PATH | os.O_CLOEXEC))
            except OSError as e:
                raise UsageError(f"cannot use {option or 'the working directory'} {path}: {e.strerror}") from e
            held.callback(os.close, found[-1])
        yield found


def opened_stream(fd: int, held: contextlib.ExitStack) -> int:
    """One of our standard streams; /dev/null where it is closed."""
    try:
        os.fstat(fd)
    except OSError:
        fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        held.callback(os.close, fd)
    return fd


class Files:
    """The receipt and the evidence that were asked for, if any; `close` when the run has ended."""

    def __init__(self, receipt: str | None, evidence: str | None, *, prefix: str = "") -> None:
        """`prefix` is what the names of both have before them where the caller gave them."""
        from sealnet.kernel.output import Directory, Output

        if receipt is not None or evidence is not None:
            # Now, and not when they are needed: by then a payload may have written where sealnet itself lies.
            import sealnet.model.evidence  # noqa: F401
        self._proof: Output | None = None
        self.bundle: Directory | None = None
        with contextlib.ExitStack() as opened:
            if receipt is not None:
                self._proof = Output(receipt, f"{prefix}receipt")
                opened.callback(self._proof.close)
            if evidence is not None:
                self.bundle = _emptied(Directory(evidence, f"{prefix}evidence"))
                opened.callback(self.bundle.close)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def started(self, run: RemoteRun) -> None:
        """Raises CannotSeal when it cannot be written."""
        if self._proof is not None and run.started:
            self._proof.write(_rendered(run.started["receipt"]))

    def ended(self, run: RemoteRun) -> None:
        """The payload is gone: whatever it has made of the files, what was observed stands there. Raises CannotSeal."""
        told = run.ended or {}
        if self._proof is not None and told.get("receipt") is not None:
            self._proof.write(_rendered(told["receipt"]))
        if self.bundle is not None:
            _leave(self.bundle, run.files)
        for written in (self._proof, self.bundle):
            if written is not None and not written.is_there():
                raise CannotSeal(f"cannot find what was written of the run at {written.path}: its directory has been moved")

    def refused(self, run: RemoteRun, given: Mapping[str, Any], uid: int, error: SealnetError) -> None:
        """A receipt that says why there was no run, where one was asked for and could have been: the worker's, or one of ours."""
        if self.bundle is not None:
            _leave(self.bundle, run.files)
        if self._proof is None or isinstance(error, UsageError):
            return
        from sealnet.kernel import process
        from sealnet.model import evidence
        from sealnet.model.receipt import Receipt

        if (parts := run.files.get(evidence.RECEIPT)) is not None:
            self._proof.write("".join(parts).encode("utf-8", "surrogateescape"))
            return

        named = ("network", "lease_port", "broker", "broker_env", "allow_unenforced_egress")
        hosts = [*(given.get("allow") or ()), *(given.get("allow_private") or ())]
        asked = str(policy.derive(**{name: given[name] for name in named if given.get(name) is not None}, allow=hosts))
        user = process.user(str(uid)).name
        told = Receipt(run_id=given["run_id"], started=time.time(), confinement=asked, asked=asked, user=user, reason=error.message)
        try:
            self._proof.write(told.render())
        except CannotSeal as unwritten:
            error.add_note(unwritten.message)


def _emptied(bundle: Directory) -> Directory:
    """Whatever becomes of us, no earlier bundle is taken for this run's."""
    from sealnet.model import evidence

    for name in bundle.names():
        if name in (evidence.PLAN, evidence.RECEIPT, evidence.ENVIRONMENT) or name.endswith(evidence.LOG_SUFFIX):
            bundle.remove(name)
    return bundle


def _leave(bundle: Directory, files: Mapping[str, Sequence[str]]) -> None:
    for name, parts in files.items():
        if "/" not in name:
            bundle.write(name, [part.encode("utf-8", "surrogateescape") for part in parts])


def _rendered(receipt: Mapping[str, Any]) -> bytes:
    return json.dumps(receipt, indent=1).encode() + b"\n"
