"""Which role may call what: the table knows every method that there is, and nothing else passes."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st

from kybernate.agent.access.caller import Role
from kybernate.agent.access.roles import RULES, Name, fits, permits, role_of_names, role_of_user
from kybernate.agent.settings import Tls
from kybernate.messages import agent_pb2, peer_pb2

FILES = (agent_pb2.DESCRIPTOR, peer_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.services_by_name.values()
    for method in service.methods
}


def test_table_has_every_method_and_no_other() -> None:
    assert set(RULES) == set(METHODS)


def test_readers_may_call_nothing_that_changes_something() -> None:
    changing = {method for method, rule in RULES.items() if rule.verb not in ("", "send")}
    assert len(changing) > 10
    for method in changing:
        assert not {Role.READER, Role.PEER, Role.NONE} & RULES[method].roles
    answering_operations = {name for name, one in METHODS.items() if one.output_type.name == "Operation"}
    assert answering_operations - changing == {
        name for name in METHODS if name.endswith(("/GetOperation", "WatchOperation"))
    }


def test_images_are_for_peers_and_operators_and_leave_a_line() -> None:
    rule = RULES["/kybernate.node.v1.Peers/OpenImage"]
    assert rule.roles == {Role.PEER, Role.OPERATOR}
    assert rule.verb == "send"


def test_containers_may_call_the_service_about_themselves_alone() -> None:
    theirs = {method for method in RULES if permits(Role.CONTAINER, method)}
    assert theirs == {method for method in METHODS if method.startswith("/kybernate.node.v1.Self/")}
    assert all(RULES[method].roles == {Role.CONTAINER} for method in theirs)


@given(st.sampled_from(sorted(Role)), st.text())
def test_unknown_method_is_refused(role: Role, method: str) -> None:
    assert method in RULES or not permits(role, method)


def test_unknown_caller_may_do_nothing() -> None:
    assert not any(permits(Role.NONE, method) for method in RULES)


@pytest.mark.parametrize(
    ("uid", "groups", "readers", "role"),
    [
        (0, {0}, 7, Role.OPERATOR),
        (0, {0}, None, Role.OPERATOR),
        (1000, {7}, 7, Role.READER),
        (1000, {1000}, 7, Role.NONE),
        (1000, {0}, None, Role.NONE),
        (65534, {0, 1}, 7, Role.NONE),
    ],
)
def test_role_of_a_user(uid: int, groups: set[int], readers: int | None, role: Role) -> None:
    assert role_of_user(uid, groups, readers) is role


def dns(*texts: str) -> list[Name]:
    return [Name("DNS", text) for text in texts]


def uri(*texts: str) -> list[Name]:
    return [Name("URI", text) for text in texts]


def test_role_of_a_certificate_is_that_of_the_first_list_with_one_of_its_names() -> None:
    tls = Tls(operators=("spiffe://site/ops/*",), readers=("*.example",), peers=("node-*",))
    eve = uri("spiffe://site/ops/eve")
    assert role_of_names([*dns("a.example"), *eve], tls) == (Role.OPERATOR, "spiffe://site/ops/eve")
    assert role_of_names(dns("node-1", "a.example"), tls) == (Role.READER, "a.example")
    assert role_of_names(dns("node-1"), tls) == (Role.PEER, "node-1")
    assert role_of_names(uri("spiffe://other/ops/eve"), tls) == (Role.NONE, "spiffe://other/ops/eve")
    assert role_of_names([], tls)[0] is Role.NONE


@pytest.mark.parametrize(
    ("name", "pattern", "matches"),
    [
        (*dns("a.example"), "*.example", True),
        (*dns("A.Example"), "*.example", True),
        (*dns("a.b.example"), "*.example", False),
        (*dns("example"), "*.example", False),
        (*dns("a.example"), "*", False),
        (*dns("node-1"), "*", True),
        (*dns("node-1.evil"), "node-*", False),
        (*dns("axexample"), "*.example", False),
        (*uri("spiffe://site/ops/eve"), "spiffe://site/ops/*", True),
        (*uri("spiffe://site/ops/eve/of/another"), "spiffe://site/ops/*", False),
        (*uri("spiffe://site/ops/eve"), "spiffe://*/ops/eve", True),
        (*uri("spiffe://site.evil/ops/eve"), "spiffe://*/ops/eve", False),
        (*uri("spiffe://evil/x/ops/eve"), "spiffe://*/ops/eve", False),
        (*dns("spiffe://site/ops/eve"), "spiffe://site/ops/*", False),
        (*uri("a.example"), "*.example", False),
        (*dns("node-[1]"), "node-[1]", True),
        (*dns("node-1"), "node-[1]", False),
    ],
)
def test_star_stands_for_text_within_a_part_of_a_name_of_the_patterns_kind(
    name: Name, pattern: str, matches: bool
) -> None:
    assert fits(name, pattern) is matches


@given(st.lists(st.text(), max_size=3))
def test_without_lists_no_certificate_has_a_role(names: list[str]) -> None:
    assert role_of_names(dns(*names), Tls())[0] is Role.NONE
