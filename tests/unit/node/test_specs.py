"""A tenant's spec of megabytes is read by another process, and says the same as a small one of what is asked."""

from __future__ import annotations

import json

import pytest

from kybernate.messages import containers_pb2
from kybernate.node import specs
from kybernate.node.containerd import group_of
from kybernate.node.specs import LARGE, MOST_EXCERPT, excerpt, is_large, spec_of

SPEC = {
    "annotations": {"io.kubernetes.cri.sandbox-id": "pod", "kybernate.io/workload": "web"},
    "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]},
    "linux": {"devices": [{"path": "/dev/nvidia0"}]},
}


def record(spec: object) -> containers_pb2.Container:
    made = containers_pb2.Container(id="c")
    made.spec.value = spec if isinstance(spec, bytes) else json.dumps(spec).encode()
    return made


def large(**more: object) -> containers_pb2.Container:
    """Return a record of 16 MiB that says the same as SPEC."""
    environment = ["BIG=" + "x" * (16 << 20), *SPEC["process"]["env"]]
    return record({**SPEC, "process": {"env": environment}, **more})


def test_large_spec_says_what_a_small_one_says() -> None:
    assert is_large(large())
    assert not is_large(record(SPEC))
    assert spec_of(large()) == spec_of(record(SPEC)) == SPEC
    assert group_of("c", spec_of(large())) == "pod"


def test_annotations_of_others_do_not_hide_those_that_are_decided_by() -> None:
    many = {f"kybernate.io/{number:06}": "x" * 1000 for number in range(10_000)}
    found = spec_of(large(annotations={**many, **SPEC["annotations"], "a": "y" * (1 << 20)}))
    assert found["annotations"]["io.kubernetes.cri.sandbox-id"] == "pod"


@pytest.mark.parametrize(
    "spec",
    [
        {"annotations": {str(number): "\x00" * 4096 for number in range(1000)}},
        {"process": {"env": ["NVIDIA_VISIBLE_DEVICES=" + "\x00" * (1 << 20)] * 9}},
        {"linux": {"devices": [{"path": "/dev/nvidia" + "\x00" * 9000}] * 4000}},
    ],
)
def test_excerpt_is_small_whatever_it_is_of(spec: dict[str, object]) -> None:
    assert len(json.dumps(excerpt(spec))) < MOST_EXCERPT


@pytest.mark.parametrize("content", [b"[" * LARGE * 2, b"no JSON" * LARGE, b'{"a":' * LARGE, b"[" + b"1," * LARGE * 2])
def test_large_spec_that_is_odd_is_empty(content: bytes) -> None:
    assert dict(spec_of(record(content))) == {}


def test_reader_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "PARSE_SECONDS", 0.0)
    one = large(annotations={"kybernate.io/slow": "x"})
    assert dict(spec_of(one)) == {}
    monkeypatch.undo()
    assert spec_of(one)["annotations"] == {"kybernate.io/slow": "x"}, "the next look tries again"


def test_spec_is_parsed_once_for_one_content(monkeypatch: pytest.MonkeyPatch) -> None:
    first = spec_of(large())
    monkeypatch.setattr(specs.subprocess, "run", None)
    assert spec_of(large()) is first


def test_this_process_parses_nothing_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's parser holds the interpreter, and with it the agent's event loop, from any thread."""
    parsed: list[int] = []
    parse = specs.bounded_json.parse

    def noted(content: bytes, **limits: int) -> object:
        parsed.append(len(content))
        return parse(content, **limits)

    monkeypatch.setattr(specs.bounded_json, "parse", noted)
    assert spec_of(large(annotations={"kybernate.io/a": "b"}))["annotations"] == {"kybernate.io/a": "b"}
    assert parsed
    assert max(parsed) < LARGE
