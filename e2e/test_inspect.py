"""Inspect's samples in sealed runs: its own checks of a sandbox, and ours. Collected where inspect-ai is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.lab import Host

pytestmark = pytest.mark.root

if importlib.util.find_spec("inspect_ai") is not None:
    import asyncio
    import inspect
    from collections.abc import Awaitable, Callable

    import inspect_ai
    from inspect_ai import Task
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import match
    from inspect_ai.solver import Generate, Solver, TaskState, solver
    from inspect_ai.util import SandboxUserUnsupportedError, sandbox
    from inspect_ai.util._sandbox import self_check

    from sealnet.inspect_sandbox import SealnetOptions, SealnetSandbox

    # A sandbox of sealnet's has one user.
    CHECKS = [
        check
        for name, check in inspect.getmembers(self_check, inspect.iscoroutinefunction)
        if name.startswith("test_") and name != "test_exec_as_user"
    ]

    def in_sandbox(look: Callable[[SealnetSandbox], Awaitable[None]], **options: object) -> None:
        async def sample() -> None:
            made = await SealnetSandbox.sample_init("task", SealnetOptions(**options), {})
            try:
                await look(made["default"])
            finally:
                await SealnetSandbox.sample_cleanup("task", None, made, False)

        asyncio.run(sample())

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_inspects_own_check(host: Host, check: Callable[[SealnetSandbox], Awaitable[None]]) -> None:
        in_sandbox(check)

    def test_a_sample_reaches_its_broker_and_keeps_its_files(host: Host) -> None:
        host.broker(8080)

        async def look(sandbox: SealnetSandbox) -> None:
            said = await sandbox.exec(["sh", "-c", "curl -fsS $URL/x; curl -s -m 2 http://192.0.2.9/; id -un; echo kept >file"])
            assert (said.returncode, said.stdout) == (0, "/xnobody\n")
            assert await sandbox.read_file("file") == "kept\n"
            assert (await sandbox.exec(["ln", "-s", "/etc/shadow", "link"])).success
            with pytest.raises(PermissionError):
                await sandbox.read_file("link")
            with pytest.raises(SandboxUserUnsupportedError):
                await sandbox.exec(["true"], user="root")

        in_sandbox(look, lease_port=8080, broker_env=("URL",))

    @solver
    def looks() -> Solver:
        async def solve(state: TaskState, _generate: Generate) -> TaskState:
            done = await sandbox().exec(["sh", "-c", "cat given; curl -s -m 2 http://192.0.2.9/ || echo severed"])
            state.output.completion = done.stdout
            return state

        return solve

    def test_an_evaluation_finds_its_sandbox_by_name(host: Host) -> None:
        task = Task(
            dataset=[Sample(input="look", target="given severed", files={"given": "given "})],
            solver=looks(),
            scorer=match(),
            sandbox="sealnet",
        )

        (log,) = inspect_ai.eval(task, model="mockllm/model", display="none", log_dir=str(host.directory))

        assert log.status == "success", log.error
        assert log.results.scores[0].metrics["accuracy"].value == 1.0
        assert not list(Path("/var/tmp").glob("sealnet-inspect-*"))
