"""What an image wants of the place where it is restored: refusals, risks, and force."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.checkpoint.compat import RestorePlace, compare, cpu_features, read_host, require_compatible
from kybernate_shim.checkpoint.image.manifest import Host, Manifest, Program, Source
from kybernate_shim.checkpoint.mounts.matching import MountUnmatched
from kybernate_shim.errors import Refused

HOST = Host("6.8.0-40-generic", "x86_64", ("avx", "avx2", "sse2"), 2, 4096)
IMAGE = Manifest(
    id="i",
    time="2026-01-02T03:04:05Z",
    source=Source("c", image_digest="sha256:aa"),
    runtime=Program("runc", "1.3.0"),
    criu=Program("criu", "4.2"),
    host=HOST,
)
SAME = RestorePlace(HOST, "4.2", "runc", "sha256:aa")


def on(**changes: Any) -> RestorePlace:
    return replace(SAME, host=replace(HOST, **changes))


def test_the_same_place_is_fine() -> None:
    assert compare(IMAGE, SAME) == []
    assert require_compatible([]) == []


def test_a_better_place_is_fine() -> None:
    host = replace(HOST, kernel="6.12.0", cpu_features=("avx", "avx2", "avx512f", "sse2"))
    assert compare(IMAGE, RestorePlace(host, "4.3.1", "runc", "")) == []


@pytest.mark.parametrize(
    ("place", "text", "verdict"),
    [
        (
            on(architecture="aarch64", cpu_features=()),
            "architecture: %s x86_64, found here: aarch64",
            "refusal",
        ),
        (on(page_size=65536), "page size: %s 4096, found here: 65536", "refusal"),
        (on(cgroup_version=1), "cgroup version: %s 2, found here: 1", "refusal"),
        (
            on(cpu_features=("avx2", "sse2")),
            "CPU registers: %s avx, found here: a CPU without",
            "refusal",
        ),
        (
            on(cpu_features=("avx", "sse2")),
            "CPU features: %s avx2, found here: a CPU without",
            "risk",
        ),
        (
            on(kernel="5.15.0"),
            "kernel: %s 6.8.0-40-generic, found here: 5.15.0, which is older",
            "risk",
        ),
        (replace(SAME, criu="4.1.1"), "CRIU: %s 4.2, found here: 4.1.1, which is older", "risk"),
        (replace(SAME, runtime="crun"), "runtime: %s runc, found here: crun", "risk"),
        (
            replace(SAME, image_digest="sha256:bb"),
            "container image: %s sha256:aa, found here: sha256:bb",
            "risk",
        ),
    ],
)
def test_a_difference_is_a_refusal_or_a_risk(place: RestorePlace, text: str, verdict: str) -> None:
    assert [(str(finding), finding.verdict) for finding in compare(IMAGE, place)] == [
        (text % "the image was made with", verdict)
    ]


def test_risks_stop_a_restore_unless_forced() -> None:
    findings = compare(IMAGE, replace(SAME, runtime="crun"))
    with pytest.raises(Refused, match=r'crun; the annotation kybernate.io/force: "true" overrides this'):
        require_compatible(findings)
    assert require_compatible(findings, force=True) == findings


def test_force_does_not_override_a_refusal() -> None:
    findings = compare(IMAGE, replace(on(cgroup_version=1), runtime="crun"))
    with pytest.raises(Refused, match="Nothing was restored") as caught:
        require_compatible(findings, force=True)
    assert str(caught.value) == "cgroup version: the image was made with 2, found here: 1. Nothing was restored"
    assert len(findings) == 2


def test_mounts_that_do_not_match_are_refusals() -> None:
    findings = compare(IMAGE, SAME, MountUnmatched(["/data is missing"]))
    assert [(str(finding), finding.verdict) for finding in findings] == [("mounts: /data is missing", "refusal")]


def test_another_container_image_is_named_before_the_mounts_that_differ_for_it() -> None:
    place = replace(SAME, image_digest="sha256:bb", image_name="web:2")
    image = replace(IMAGE, source=replace(IMAGE.source, image="web:1"))
    with pytest.raises(Refused, match="Nothing was restored") as caught:
        require_compatible(compare(image, place, MountUnmatched(["/data is missing"])), force=True)
    assert str(caught.value) == (
        "container image: the image was made with web:1 (sha256:aa), found here: web:2 (sha256:bb);"
        " mounts: /data is missing. Nothing was restored"
    )


def test_another_name_decides_nothing_and_explains_what_does() -> None:
    """containerd names an image that has several names by one of them."""
    image, place = replace(IMAGE, source=Source("c", image="web:1")), replace(SAME, image_name="web:2")
    findings = compare(image, place)
    assert [finding.verdict for finding in findings] == ["hint"]
    assert require_compatible(findings) == []
    for force in (False, True):
        with pytest.raises(Refused, match="image was made with web:1, found here: web:2; mounts: /data"):
            require_compatible(compare(image, place, MountUnmatched(["/data is missing"])), force=force)
    with pytest.raises(Refused, match=r'web:2; runtime: .*; the annotation kybernate.io/force: "true" overrides'):
        require_compatible(compare(image, replace(place, runtime="crun")))
    (risk,) = require_compatible(compare(image, replace(place, runtime="crun")), force=True)
    assert risk.fact == "runtime"


def test_features_are_those_of_every_core_and_of_use_to_programs() -> None:
    text = "processor\t: 0\nflags\t\t: sse2 avx ibrs\n\nprocessor\t: 1\nflags\t\t: sse2 ibrs\nvmx flags\t: x\n"
    assert cpu_features(text) == ("sse2",)
    assert cpu_features("processor : 0\nFeatures\t: fp asimd sve cpuid\n") == ("asimd", "sve")
    assert cpu_features("") == ()


def test_this_machine_is_compatible_with_itself(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags : avx sse2\n")
    host = read_host(2, tmp_path / "cpuinfo")
    assert host.cpu_features == ("avx", "sse2")
    assert compare(replace(IMAGE, host=host), replace(SAME, host=host)) == []
