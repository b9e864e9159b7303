"""Shows each failure when it happens, in one line: a long run that is cut short must not take its reasons along.

No property has a deadline: how long an example takes is the machine's affair. Properties are tried on the same examples
in each run, so that a run says something of the change that it tests; `make search` looks for others.
"""

from __future__ import annotations

import hypothesis
import pytest

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, derandomize=False, max_examples=1000)
hypothesis.settings.load_profile("repeatable")


class Teller:
    """Writes through pytest's own reporter, which repeats each failure in full at the end."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Name a test that has just failed, with the first line of its reason."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(getattr(crash, "message", "")).partition("\n")[0]
            self._reporter.ensure_newline()
            self._reporter.write_line(f"failed in {report.when}: {report.nodeid}: {reason[:300]}")


@pytest.hookimpl(trylast=True)  # the reporter joins in this hook, too
def pytest_configure(config: pytest.Config) -> None:
    """Join the reporter, where there is one."""
    if reporter := config.pluginmanager.getplugin("terminalreporter"):
        config.pluginmanager.register(Teller(reporter))
