"""Plugin of pytest for `--without-torch`: skips what fails because torch cannot be imported.

A Python for which no build of torch is at hand runs the rest of the tests. The error of the import decides,
no list of tests. A plugin, as the hooks of a conftest are not asked about folders whose own conftest fails.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

_REASON = "Skipped: imports torch"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if _lacks_torch(report.call.excinfo):  # type: ignore[attr-defined]
        report.outcome, report.longrepr, report.result = "skipped", (str(collector.path), 0, _REASON), []
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if _lacks_torch(call.excinfo):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, _REASON)
    return report


def _lacks_torch(excinfo: pytest.ExceptionInfo[BaseException] | None) -> bool:
    """True if an error, or one that it comes from, is a failed import of torch."""
    error = None if excinfo is None else excinfo.value
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return True
        error = getattr(error, "cause", None) or error.__cause__ or error.__context__
    return False
