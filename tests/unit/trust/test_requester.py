"""Who chose what a container asks for, and what each may."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kybernate_shim.config import Config
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.requester import NODE, Requester, requester_of
from kybernate_shim.trust.rights import RULES, Right, may

TENANT = Requester("tenant", "team-a", "pod", "uid", "main")


def test_containers_of_cri_are_a_tenants() -> None:
    notes = {
        "io.kubernetes.cri.container-type": "container",
        "io.kubernetes.cri.sandbox-namespace": "team-a",
        "io.kubernetes.cri.sandbox-name": "pod",
        "io.kubernetes.cri.sandbox-uid": "uid",
        "io.kubernetes.cri.container-name": "main",
    }
    assert requester_of(Spec({"annotations": notes})) == TENANT
    assert str(TENANT) == "pod team-a/pod, container main"


@pytest.mark.parametrize(
    "note",
    [
        "io.kubernetes.cri.container-type",
        "io.kubernetes.cri.image-name",
        "io.kubernetes.cri-o.Name",
        "io.container.manager",
    ],
)
def test_any_mark_of_a_kubelets_runtime_makes_a_tenant(note: str) -> None:
    assert requester_of(Spec({"annotations": {note: ""}})).is_tenant


@pytest.mark.parametrize("document", [{}, {"annotations": None}, {"annotations": {"kybernate.io/restore-from": "x"}}])
def test_containers_without_the_mark_are_roots(document: dict[str, object]) -> None:
    assert requester_of(Spec(document)) == NODE


def test_every_right_has_a_rule_and_root_has_all_but_one() -> None:
    assert set(RULES) == set(Right)
    assert [right for right in Right if not may(NODE, right, Config())] == [Right.ENVIRONMENT]  # an image may set it
    assert may(NODE, Right.ENVIRONMENT, Config(restore_from_env=True))


def test_a_tenant_has_none_by_default_and_two_by_configuration() -> None:
    assert not [right for right in Right if may(TENANT, right, Config())]
    base = Config(restore_from_env=True)
    widened = replace(base, gpu=replace(base.gpu, visible_devices_env=True))
    assert {right for right in Right if may(TENANT, right, widened)} == {Right.ENVIRONMENT, Right.VISIBLE_DEVICES}
