"""The tables of docs/api.md, from the agent's proto files: calls with their roles, messages with their fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kybernate.agent.access.caller import Role
from kybernate.agent.access.roles import NODE, RULES

PROTO = Path(__file__).parents[1] / "proto/node"
OURS = ("agent", "peer")  # the others in the directory are containerd's
BLOCK = re.compile(r"(service|message|enum) (\w+) \{(\})?")
CALL = re.compile(r"rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\);")
FIELD = re.compile(r"([\w.<>, ]+?) = (\d+);")


@dataclass
class Entry:
    """A service, a message or an enum. A row is what stands on one line of it, with the comments before and behind."""

    kind: str
    name: str
    doc: str
    rows: list[tuple[str, str]] = field(default_factory=list)


def entries(text: str) -> Iterator[Entry]:
    """Yield what a proto file defines; what a message encloses is before it, with its name before the own one.

    The file has one definition a line, as ours has.
    """
    around: list[Entry] = []
    comment: list[str] = []
    for line in map(str.strip, text.splitlines()):
        code, _, behind = line.partition("//")
        if not code:
            comment = [*comment, behind.strip()] if behind and not behind.startswith(" ----") else []
        elif opened := BLOCK.match(code):
            name = f"{around[-1].name}.{opened[2]}" if around else opened[2]
            around.append(Entry(opened[1], name, " ".join(comment)))
            comment = []
            if opened[3]:
                yield around.pop()
        elif code.startswith("}") and around:
            yield around.pop()
        elif around and not code.startswith("oneof"):
            around[-1].rows.append((code.strip(), " ".join([*comment, behind.strip()]).strip()))
            comment = []


def calls_table() -> str:
    """Return a table for each service: method, request, answer, who may call it, and what it does."""
    parts = []
    for one in entries(_flat()):
        if one.kind == "service":
            lines = [
                f"### {one.name}",
                "",
                one.doc,
                "",
                "| call | request | answer | roles | |",
                "|---|---|---|---|---|",
            ]
            parts.append("\n".join([*lines, *(_call(one.name, *row) for row in one.rows)]))
    return "\n\n".join(parts) + "\n"


def messages_table() -> str:
    """Return a table for each message and enum."""
    parts = []
    for one in entries(_flat()):
        if one.kind != "service" and one.rows:
            rows = [f"| `{name}` | {_kind(kind)} | {_escaped(doc)} |" for kind, name, doc in _fields(one)]
            parts.append("\n".join([f"### {one.name}", *(["", one.doc] if one.doc else []), "", *_head(one), *rows]))
    return "\n\n".join(parts) + "\n"


def _flat() -> str:
    """Return the proto files with the fields of a `oneof` as those of its message."""
    text = "\n".join((PROTO / f"{name}.proto").read_text() for name in OURS)
    return re.sub(r"oneof \w+ \{(.*?)\n  \}", r"\1", text, flags=re.DOTALL)


def _call(service: str, code: str, doc: str) -> str:
    found = CALL.match(code)
    assert found, code
    name, sent, request, stream, answer = found.groups()
    rule = RULES[f"/{NODE}.{service}/{name}"]
    roles = ", ".join(role.value for role in Role if role in rule.roles)
    sent, stream = ("stream of " if one else "" for one in (sent, stream))
    return f"| `{name}` | {sent}`{request}` | {stream}`{answer}` | {roles} | {_escaped(doc)} |"


def _fields(one: Entry) -> Iterator[tuple[str, str, str]]:
    for code, doc in one.rows:
        found = FIELD.match(code)
        assert found, code
        kind, _, name = found[1].rpartition(" ")
        yield kind, name, doc if kind else f"{doc} ({found[2]})".strip()


def _head(one: Entry) -> list[str]:
    return ["| value | | meaning |" if one.kind == "enum" else "| field | type | meaning |", "|---|---|---|"]


def _kind(kind: str) -> str:
    return f"`{kind}`" if kind else ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
