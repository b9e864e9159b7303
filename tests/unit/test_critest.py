"""The outcomes of critest's specs, from the reports that Ginkgo writes."""

from __future__ import annotations

from xml.sax.saxutils import quoteattr

from tests.system.critest import read


def report(**cases: str) -> str:
    lines = [f"<testcase name={quoteattr(name)} status={quoteattr(how)}/>" for name, how in cases.items()]
    return f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>"


def test_outcome_is_that_of_each_spec_by_its_full_text() -> None:
    found = read(report(**{"[It] [k8s.io] PodSandbox <1> & more": "passed", "[SynchronizedBeforeSuite]": "failed"}))
    assert found == {"[k8s.io] PodSandbox <1> & more": "passed"}
