"""Fixtures of the cluster's tests: the cluster, a namespace for each test, kubectl in it, and both handlers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.kubectl import Kubectl, KubectlFailed
from tests.lab.cluster import cluster as lab
from tests.lab.cluster.addresses import USER
from tests.lab.cluster.manifests import USER as USER_NAME
from tests.lab.cluster.manifests import binding

OURS, STOCK = "kybernate", "runc"
OF_TESTS = "kybernate.io/lab=test"  # the label of the tests' namespaces
_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if items and not lab.FACTS.exists():
        raise pytest.UsageError("these tests run in a lane with a cluster: tests/lab/run cluster -- …")


@pytest.fixture(scope="session")
def cluster() -> lab.Cluster:
    """The cluster of this node of the lab, with its programs, which tests may kill and restart."""
    return lab.running()


@pytest.fixture(params=[pytest.param(OURS, id="ours"), pytest.param(STOCK, id="stock")])
def handler(request: pytest.FixtureRequest) -> str:
    """The RuntimeClass of our handler and, as the oracle for the same test, of containerd's own."""
    return str(request.param)


@pytest.fixture(scope="session")
def administrator() -> Iterator[Kubectl]:
    """kubectl as the cluster's administrator, in the namespace "default"."""
    found = Kubectl()
    yield found
    found.wait("delete", "namespaces", "--selector", OF_TESTS, seconds=120)


@pytest.fixture
def kubectl(administrator: Kubectl, request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """kubectl as the administrator in a namespace of this test, which is removed while the next test runs."""
    found = administrator.within(f"test-{next(_numbers)}")
    label, _, value = OF_TESTS.partition("=")
    metadata = {"name": found.namespace, "labels": {label: value}}
    administrator.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    found.wait("create", "serviceaccount/default")
    request.node.kubectl = found
    yield found
    administrator("delete", "namespace", found.namespace, "--wait=false")
    found("delete", "pods", "--all", "--now", "--wait=false")  # sooner than after their grace periods


@pytest.fixture
def user(kubectl: Kubectl) -> Kubectl:
    """kubectl as a plain user, who may edit what is in this test's namespace and in his own."""
    kubectl.create(binding("RoleBinding", USER_NAME, "edit", USER_NAME))
    return Kubectl(kubectl.namespace, USER)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Show what the cluster says of a failed test's namespace."""
    report = yield
    if report.failed and hasattr(item, "kubectl"):
        for words in (("get", "all", "-o", "wide"), ("events",)):
            try:
                report.sections.append((f"kubectl {words[0]}", item.kubectl(*words)))
            except KubectlFailed as failure:
                report.sections.append((f"kubectl {words[0]}", str(failure)))
    return report
