"""Which role may call which method: one table. A method that is not in it is refused.

A test compares the table with the methods of the services that the agent serves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from kybernate.agent.access.caller import Role
from kybernate.agent.settings import Tls
from kybernate.verbs.every import VERBS

NODE: Final = "kybernate.node.v1"
OPERATORS: Final = frozenset({Role.OPERATOR})
READERS: Final = OPERATORS | {Role.READER, Role.PROXY}
PROXIES: Final = OPERATORS | {Role.PROXY}
PEERS: Final = READERS | {Role.PEER}
IMAGES: Final = OPERATORS | {Role.PEER}
CONTAINERS: Final = frozenset({Role.CONTAINER})
ROOT: Final = 0


@dataclass(frozen=True)
class Rule:
    """Who may call a method. `verb` is the audit log's word for it, "" where no line is written."""

    roles: frozenset[Role]
    verb: str = ""


def _verbs(service: str) -> Mapping[str, Rule]:
    """Return the rules of a service's methods that begin operations, as their verbs have them."""
    kinds = [kind for kind in VERBS.values() if kind.call.startswith(f"{service}/")]
    return {kind.call.partition("/")[2]: Rule(frozenset(map(Role, kind.roles)), kind.verb) for kind in kinds}


_SERVICES: Final[Mapping[str, Mapping[str, Rule]]] = {
    f"{NODE}.Inventory": {
        "GetNode": Rule(PEERS),
        "ListContainers": Rule(READERS),
        "GetContainer": Rule(READERS),
        "Watch": Rule(READERS),
        "ReadLog": Rule(OPERATORS),
    },
    f"{NODE}.Operations": {
        **_verbs("Operations"),
        "GetOperation": Rule(READERS),
        "ListOperations": Rule(READERS),
        "WatchOperation": Rule(READERS),
        "CancelOperation": Rule(OPERATORS, "cancel"),
    },
    f"{NODE}.Activity": {"ReportActivity": Rule(PROXIES)},
    f"{NODE}.Checkpoints": {
        "ListImages": Rule(PEERS),
        "GetImage": Rule(PEERS),
        "PinImage": Rule(OPERATORS, "pin"),
        "LabelImage": Rule(OPERATORS, "label"),
        **_verbs("Checkpoints"),
    },
    f"{NODE}.Peers": {"OpenImage": Rule(IMAGES, "send"), "CloseImage": Rule(IMAGES)},
    f"{NODE}.Self": {
        "GetSelf": Rule(CONTAINERS),
        "Checkpoint": Rule(CONTAINERS, "checkpoint"),
        "SuspendWhenIdle": Rule(CONTAINERS, "suspend"),
        "GetOperation": Rule(CONTAINERS),
        "CancelOperation": Rule(CONTAINERS, "cancel"),
    },
    "grpc.health.v1.Health": {"Check": Rule(PEERS), "Watch": Rule(PEERS), "List": Rule(PEERS)},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": Rule(READERS)},
}
RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {f"/{service}/{name}": rule for service, methods in _SERVICES.items() for name, rule in methods.items()}
)


def permits(role: Role, method: str) -> bool:
    """Return whether a role may call a method, a full name such as "/kybernate.node.v1.Inventory/GetNode"."""
    rule = RULES.get(method)
    return rule is not None and role in rule.roles


def role_of_user(uid: int, groups: Collection[int], readers: int | None) -> Role:
    """Return the role of a process on the agent's socket; `readers` is the group's number, None without one."""
    if uid == ROOT:
        return Role.OPERATOR
    return Role.READER if readers is not None and readers in groups else Role.NONE


class Name(NamedTuple):
    """A name of a certificate (SAN): its kind, "URI" or "DNS", and its text."""

    kind: str
    text: str


def role_of_names(names: Collection[Name], tls: Tls) -> tuple[Role, str]:
    """Return the role of a certificate with these names, and the name that gives it."""
    listed = {
        Role.OPERATOR: tls.operators,
        Role.PROXY: tls.proxies,
        Role.READER: tls.readers,
        Role.PEER: tls.peers,
    }
    for role, patterns in listed.items():
        for name in names:
            if any(fits(name, pattern) for pattern in patterns):
                return role, name.text
    return Role.NONE, next((name.text for name in names), "a certificate without names")


def fits(name: Name, pattern: str) -> bool:
    """Return whether a name is of the pattern's kind, which "://" makes one of URIs, and matches it.

    `*` stands for some text, never for none, within one part: a label of a DNS name or of a URI's host, or what is
    between two slashes of its path. So a pattern gives no role to names that another authority hands out below it.
    """
    scheme, is_uri, rest = pattern.partition("://")
    if name.kind != ("URI" if is_uri else "DNS"):
        return False
    if not is_uri:
        return re.fullmatch(_expression(pattern.lower(), "[^.]+"), name.text.lower()) is not None
    host, slash, path = rest.partition("/")
    expression = f"{re.escape(scheme)}://{_expression(host, '[^./]+')}{slash}{_expression(path, '[^/]+')}"
    return re.fullmatch(expression, name.text) is not None


def _expression(pattern: str, any_text: str) -> str:
    return any_text.join(map(re.escape, pattern.split("*")))


def markdown_table() -> str:
    """Return the table of methods and roles for the manual."""
    lines = ["| service | method | roles |", "|---|---|---|"]
    for method, rule in RULES.items():
        _, service, name = method.split("/")
        roles = ", ".join(role.value for role in Role if role in rule.roles)
        lines.append(f"| `{service}` | `{name}` | {roles} |")
    return "\n".join(lines) + "\n"
