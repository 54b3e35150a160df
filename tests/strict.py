"""Gives the marks `root` and `tool` their meaning; with SEALNET_TESTS_STRICT=1 such a test fails where it would be skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator

import pytest

STRICT = os.environ.get("SEALNET_TESTS_STRICT") == "1"


def lost(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid} was skipped, and SEALNET_TESTS_STRICT=1 makes that a failure: {reason}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")
    for mark in item.iter_markers("tool"):
        for name in mark.args:
            if shutil.which(name) is None:
                pytest.skip(f"needs {name}")


# First, so that it sees what the skipping and xfail plugins made of the outcome.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    marked = any(item.iter_markers("root")) or any(item.iter_markers("tool"))
    if STRICT and marked and report.skipped and not hasattr(report, "wasxfail"):
        lost(report)
    return report


# A module that skips itself while it is collected takes its marks with it, so every such skip counts.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if STRICT and report.skipped:
        lost(report)
    return report
