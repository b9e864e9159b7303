"""Every GPU of an image finds a place, or a sentence says why not; a map names each that could be opened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.gpu.errors import GpuPair
from kybernate_shim.gpu.gpu_map import (
    GpuMismatch,
    GpuPlan,
    Used,
    device_numbers,
    make_plan,
    parse_map,
    require_room,
    usable_gpus,
)
from kybernate_shim.gpu.helper_answers import NodeGpu

GIB = 1 << 30


def gpu(
    name: str, *, model: str = "H200", total: int = 80 * GIB, free: int | None = 80 * GIB, number: int = 0
) -> NodeGpu:
    return NodeGpu(name, model, total, free, False, number)


def used(name: str, size: int = GIB, model: str = "H200") -> Used:
    return Used(name, model, size)


HERE = [gpu("GPU-a", number=0), gpu("GPU-b", number=1), gpu("GPU-c", number=2)]
ALL = ["GPU-a", "GPU-b", "GPU-c"]


def usable(*names: str) -> list[NodeGpu]:
    return [gpu for name in names for gpu in HERE if gpu.uuid == name]


def test_same_gpu_needs_no_map() -> None:
    assert make_plan([used("GPU-b")], ALL, HERE, {}) == GpuPlan((), {"GPU-b": GIB})


def test_only_gpu_moves_to_the_only_one_of_the_new_container() -> None:
    plan = make_plan([used("GPU-a")], ["GPU-a"], usable("GPU-b"), {})
    assert plan == GpuPlan((GpuPair("GPU-a", "GPU-b"),), {"GPU-b": GIB})


def test_explicit_move_makes_the_rest_change_places() -> None:
    plan = make_plan([used("GPU-a")], ALL, HERE, {"GPU-a": "GPU-b"})
    assert plan.pairs == (GpuPair("GPU-a", "GPU-b"), GpuPair("GPU-b", "GPU-a"), GpuPair("GPU-c", "GPU-c"))
    assert plan.bytes == {"GPU-b": GIB}


def test_gpu_without_anything_on_it_needs_a_place_too() -> None:
    plan = make_plan([used("GPU-y")], ["GPU-x", "GPU-y"], usable("GPU-c", "GPU-a"), {})
    assert plan.pairs == (GpuPair("GPU-x", "GPU-a"), GpuPair("GPU-y", "GPU-c"))


def test_gpus_are_mapped_where_nobody_knows_what_is_on_them() -> None:
    assert make_plan([], ["GPU-x"], usable("GPU-c"), {}).pairs == (GpuPair("GPU-x", "GPU-c"),)


def test_gpu_with_room_is_preferred_to_one_without() -> None:
    here = [gpu("GPU-a", free=0), gpu("GPU-b")]
    assert make_plan([used("GPU-x")], ["GPU-x"], here, {}).bytes == {"GPU-b": GIB}


def test_explicit_map_decides() -> None:
    assert make_plan([used("GPU-a")], ALL, HERE, {"GPU-a": "GPU-c"}).bytes == {"GPU-c": GIB}


@pytest.mark.parametrize(
    ("wanted", "visible", "here", "explicit", "words"),
    [
        ([used("GPU-a", model="B200")], ALL, ALL, {}, "is a H200, the image needs a B200"),
        ([used("GPU-a", 100 * GIB)], ALL, ALL, {}, "81920 MiB, the image needs 102400 MiB"),
        ([used("GPU-a"), used("GPU-b")], ALL, ["GPU-a"], {}, "as many as it had"),
        ([used("GPU-w")], ["GPU-w", "GPU-x", "GPU-y", "GPU-z"], ALL, {}, "a container with 4 GPUs"),
        ([used("GPU-a")], ALL, ["GPU-a", "GPU-c"], {}, "this one has 2"),
        ([used("GPU-a")], ALL, ALL, {"GPU-q": "GPU-a"}, "has no GPU GPU-q"),
        ([used("GPU-a")], ALL, ALL, {"GPU-a": "GPU-q"}, "has no GPU GPU-q"),
        ([used("GPU-a")], ALL, ALL, {"GPU-a": "GPU-c", "GPU-b": "GPU-c"}, "two GPUs cannot become one"),
    ],
)
def test_mismatch_is_a_sentence(
    wanted: list[Used], visible: list[str], here: list[str], explicit: dict[str, str], words: str
) -> None:
    with pytest.raises(GpuMismatch, match=words):
        make_plan(wanted, visible, usable(*here), explicit)


def test_too_little_free_memory_is_refused_and_unknown_is_not() -> None:
    plan = GpuPlan((), {"GPU-a": 2 * GIB})
    with pytest.raises(GpuMismatch, match="1024 MiB free, 2048 MiB are needed"):
        require_room(plan, [gpu("GPU-a", free=GIB)])
    require_room(plan, [gpu("GPU-a", free=None)])


@given(st.permutations(ALL), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3))
def test_map_names_what_was_visible_and_keeps_to_what_is_usable(
    targets: list[str], seen: int, wanted: int, more: int
) -> None:
    visible, here = ALL[:seen], targets[: seen + more]
    plan = make_plan([used(name) for name in visible[:wanted]], visible, usable(*here), {})
    assert set(plan.bytes) <= set(here)
    assert len(plan.bytes) == min(wanted, seen)
    if plan.pairs:
        assert [pair.old for pair in plan.pairs] == visible
        assert len({pair.new for pair in plan.pairs} & set(here)) == seen
    else:
        assert set(visible) <= set(here)


def test_map_is_read_from_an_annotation() -> None:
    assert parse_map("GPU-a=GPU-b, GPU-c=GPU-d") == {"GPU-a": "GPU-b", "GPU-c": "GPU-d"}
    assert parse_map("") == {}
    for text in ("GPU-a", "a=b", "GPU-a=GPU-b,GPU-a=GPU-c", "0=1"):
        with pytest.raises(GpuMismatch, match=r"kybernate.io/gpu-map"):
            parse_map(text)


def test_device_nodes_decide_before_the_environment() -> None:
    assert device_numbers(["/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/null"]) == [1]
    assert usable_gpus([1], "all", HERE) == ["GPU-b"]
    assert usable_gpus([], "2", HERE) == ["GPU-c"]
    assert usable_gpus([], "GPU-a,GPU-c", HERE) == ["GPU-a", "GPU-c"]
    assert usable_gpus([], "all", HERE) == usable_gpus([], None, HERE) == ALL
