"""A sandbox for Inspect (inspect-ai), `sandbox="sealnet"`: each command of a sample is a sealed run, and each access to its files."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict

from sealnet import aio, caller
from sealnet.interface import CompletedRun, Worker
from sealnet.kernel import process

_TIMED_OUT, _NOT_EXECUTABLE = 124, 126
# What the scripts below exit with, and no program of theirs does.
_ABSENT, _DENIED, _DIRECTORY = 92, 93, 94
_ERRORS = {_ABSENT: errno.ENOENT, _DENIED: errno.EACCES, _DIRECTORY: errno.EISDIR}
_READ = f'[ -e "$1" ] || exit {_ABSENT}; [ -d "$1" ] && exit {_DIRECTORY}; [ -r "$1" ] || exit {_DENIED}; exec head -c "$2" -- "$1"'
_WRITE = f'[ -d "$1" ] && exit {_DIRECTORY}; mkdir -p -- "$(dirname -- "$1")" && cat >"$1" || exit {_DENIED}'


class SealnetOptions(BaseModel):
    """What a sample may reach, by the names that `sealnet.run` has for it: nothing, when none is given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lease_port: int | None = None
    broker: str | None = None
    allow: tuple[str, ...] = ()
    allow_private: tuple[str, ...] = ()
    broker_env: tuple[str, ...] = ()
    user: str | None = None
    worker: Worker = "auto"


@sandboxenv(name="sealnet")
class SealnetSandbox(SandboxEnvironment):
    """One sample's. Its working directory and /tmp are its own and last as long as it does; processes end with their command."""

    def __init__(self, options: SealnetOptions) -> None:
        super().__init__()
        self._options = options.model_dump(exclude={"user", "worker"}, exclude_defaults=True)
        self._sealer = aio.Sealer(worker=options.worker)
        self._user = process.user(options.user or caller.unprivileged_user(os.environ))
        self._place = Path(tempfile.mkdtemp(prefix="sealnet-inspect-", dir="/var/tmp"))
        self._place.chmod(0o711)
        for name in ("home", "tmp"):
            made = self._place / name
            made.mkdir(mode=0o700)
            if os.geteuid() == 0:
                os.chown(made, self._user.uid, self._user.gid)

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return SealnetOptions(**config)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        if not isinstance(config, SealnetOptions | None):
            raise TypeError("the configuration of a sealnet sandbox is a sealnet.inspect_sandbox.SealnetOptions")
        return {"default": cls(config or SealnetOptions())}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            if isinstance(environment, cls):
                shutil.rmtree(environment._place, ignore_errors=True)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002 - Inspect's name
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        if user not in (None, self._user.name, str(self._user.uid)):
            raise SandboxUserUnsupportedError(f"a sealnet sandbox has one user, {self._user.name}, and {user} is another")
        began = time.monotonic()
        done = await self._run(cmd, input=input, chdir=cwd, set_env=list((env or {}).items()), timeout_s=timeout)
        if done.returncode == _TIMED_OUT and timeout is not None and time.monotonic() - began >= timeout:
            raise TimeoutError(f"the command took longer than {timeout} s")
        out, err = (data.decode(errors="replace") if isinstance(data, bytes) else "" for data in (done.stdout, done.stderr))
        if done.returncode == _NOT_EXECUTABLE:
            raise PermissionError(err.strip() or "the command is not executable")
        for data, text in ((done.stdout, out), (done.stderr, err)):
            if len(data or b"") > SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, text)
        return ExecResult(done.returncode == 0, done.returncode, out, err)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        await self._file(_WRITE, file, input=contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        most = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        data = await self._file(_READ, file, str(most + 1))
        if len(data) > most:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data

    async def _file(self, script: str, file: str, *words: str, input: str | bytes | None = None) -> bytes:  # noqa: A002 - as above
        # In a seal, as the payload's user: a link that a payload has left there leads nowhere that it could not go itself.
        done = await self._run(["sh", "-c", script, "sh", file, *words], input=input)
        if (number := _ERRORS.get(done.returncode)) is not None:
            raise OSError(number, os.strerror(number), file)
        if done.returncode or not isinstance(done.stdout, bytes):
            raise OSError(f"cannot use {file}: {done.stderr!r}")
        return done.stdout

    async def _run(self, argv: list[str], **options: Any) -> CompletedRun:
        given = {"stdin": subprocess.DEVNULL} | options if options.get("input") is None else options
        bind = [f"{self._place}/tmp:/tmp"]
        return await self._sealer.run(
            argv, cwd=self._place / "home", bind=bind, user=self._user.uid, capture_output=True, **self._options, **given
        )
