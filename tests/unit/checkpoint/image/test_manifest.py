"""The manifest: what is written is read back, and what does not fit is refused under its name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.checkpoint.image.manifest import (
    File,
    Host,
    ImageMount,
    ImageProcess,
    Manifest,
    ManifestInvalid,
    Program,
    Source,
    UsedGpu,
    decode,
    encode,
    is_flat,
    now,
)
from kybernate_shim.linux.thread_settings import ThreadSettings
from kybernate_shim.steps import Step

SMALL = Manifest(
    id="a",
    time="2026-01-02T03:04:05.678Z",
    source=Source("c1"),
    runtime=Program("runc", "1.3.0"),
    criu=Program("criu", "4.2", ("tcp-close",)),
    host=Host("6.12.1", "x86_64", ("avx2",), 2, 4096),
    processes=(ImageProcess(1, "sh", 4096),),
    files=(File("pages-1.img", 3, "blake2b:00"),),
)


def document(**changes: Any) -> dict[str, Any]:
    return {**json.loads(encode(SMALL)), **changes}


def refusal(content: object) -> str:
    with pytest.raises(ManifestInvalid) as caught:
        decode(json.dumps(content).encode())
    return str(caught.value)


text = st.text(st.characters(codec="utf-8"))
sizes = st.integers(0, 2**63)
names = st.text(
    st.characters(codec="utf-8", exclude_characters="/.\x7f", exclude_categories=["Cc"]), min_size=1, max_size=60
)


@given(
    st.builds(
        Manifest,
        id=st.text(st.characters(codec="utf-8"), min_size=1),
        time=st.datetimes().map(lambda time: time.isoformat() + "Z"),
        source=st.builds(Source, *[text] * 7),
        runtime=st.builds(Program, text, text, st.lists(text).map(tuple)),
        criu=st.builds(Program, text, text, st.lists(text).map(tuple)),
        host=st.builds(Host, text, text, st.lists(text).map(tuple), st.sampled_from([1, 2]), sizes),
        tcp=st.sampled_from(["close", "established"]),
        stdio=st.lists(st.sampled_from(["null", "pipe", "file", "terminal"]), max_size=3).map(tuple),
        processes=st.lists(st.builds(ImageProcess, sizes, text, sizes)).map(tuple),
        gpus=st.lists(st.builds(UsedGpu, text, text, text)).map(tuple),
        mounts=st.lists(st.builds(ImageMount, text, text, text, text, st.lists(text).map(tuple))).map(tuple),
        files=st.lists(st.builds(File, names, sizes, text), unique_by=lambda file: file.name).map(tuple),
        steps=st.lists(st.builds(Step, text, st.floats(0, 1e6), sizes)).map(tuple),
    )
)
def test_manifest_survives_a_round_trip(manifest: Manifest) -> None:
    assert decode(encode(manifest)) == manifest


def test_names_that_are_not_utf8_survive() -> None:
    name = b"bad\xff".decode(errors="surrogateescape")
    manifest = Manifest(**{**vars(SMALL), "processes": (ImageProcess(1, name, 0),)})
    assert decode(encode(manifest)).processes[0].name == name


@given(st.binary())
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    with pytest.raises(ManifestInvalid):
        decode(content)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(document())), json_values)
def test_a_strange_value_is_read_or_refused_by_its_fields_name(field: str, value: Any) -> None:
    try:
        decode(json.dumps(document(**{field: value})).encode())
    except ManifestInvalid as error:
        assert str(error).startswith(field)  # noqa: PT017  (most values are refused, a few fit)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": ""}, "id: empty"),
        ({"id": 3}, "id: expected text, found 3"),
        ({"processes": [{"pid": "1", "name": "sh", "rss_bytes": 0}]}, "processes[0].pid: expected a whole number"),
        ({"processes": [{"pid": 1, "name": "sh"}]}, "processes[0].rss_bytes: missing"),
        ({"processes": {}}, "processes: expected an array"),
        ({"processes": [{"pid": -1, "name": "sh", "rss_bytes": 0}]}, "processes[0].pid: expected 0 or more"),
        ({"rootfs_diff": 1}, "rootfs_diff: expected true or false, found 1"),
        ({"tcp": "drop"}, "tcp: expected one of close, established, found 'drop'"),
        ({"time": "yesterday"}, "time: 'yesterday' is not a time"),
        ({"time": "2026-01-02T03:04:05"}, "time: "),
        ({"host": None}, "host: expected an object"),
        ({"colour": "red"}, "colour: unknown field"),
        ({"version": 2}, "version: 2 is not supported, only 1 is"),
        ({"files": [{"name": "../x", "size": 0, "digest": ""}]}, "files[0].name: '../x' is not the name"),
        ({"files": [{"name": "a/b", "size": 0, "digest": ""}]}, "files[0].name"),
        ({"files": [{"name": "kybernate-manifest.json", "size": 0, "digest": ""}]}, "files[0].name"),
        ({"files": [{"name": "a", "size": 0, "digest": ""}] * 2}, "files[1].name: 'a' is listed twice"),
    ],
)
def test_a_wrong_value_is_refused_under_its_name(changes: dict[str, Any], words: str) -> None:
    assert refusal(document(**changes)).startswith(words)


def test_a_missing_field_is_named() -> None:
    content = document()
    del content["host"]["kernel"]
    assert refusal(content) == "host.kernel: missing"


def test_another_version_is_named_before_its_strange_fields() -> None:
    assert refusal({"version": 9, "everything": "else"}).startswith("version: 9")


def test_the_time_now_is_accepted() -> None:
    assert decode(encode(Manifest(**{**vars(SMALL), "time": now()}))).id == "a"


def test_bytes_are_those_of_all_files() -> None:
    assert SMALL.bytes == 3


@pytest.mark.parametrize("name", ["", ".", "..", "a..b", "a/b", "a\0"])
def test_a_name_that_containerd_cannot_unpack_is_not_flat(name: str) -> None:
    assert not is_flat(name)


def test_chosen_settings_of_threads_are_read_back_and_left_out_where_there_are_none() -> None:
    assert "threads" not in document()
    odd = replace(SMALL, threads=(ThreadSettings(1, 7, "0-3,8", 777, 2 << 13), ThreadSettings(1, 1, core_filter=0)))
    assert decode(encode(odd)) == odd


def test_cpus_that_are_none_are_refused() -> None:
    assert refusal(document(threads=[{"pid": 1, "tid": 1, "cpus": "0-99999999"}])).startswith("threads[0].cpus: ")


def test_declared_destinations_are_left_out_where_they_are_the_mounts_own() -> None:
    """Releases that do not know them refuse unknown fields."""
    mounts = (ImageMount("/data", "bind", "host", "/x"), ImageMount("/run/d", "bind", "host", declared="/var/run/d"))
    content = encode(replace(SMALL, mounts=mounts))
    assert ["declared" in one for one in json.loads(content)["mounts"]] == [False, True]
    assert decode(content).mounts == mounts
