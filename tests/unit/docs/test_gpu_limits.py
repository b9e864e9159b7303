"""docs/gpus.md lists what cannot work on GPUs: what the code refuses, and how sure it is, and what it does not see."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kybernate_shim.gpu.evidence import Evidence, _managed_bytes
from kybernate_shim.gpu.helper_answers import CudaInfo, NodeGpu
from kybernate_shim.gpu.preflight import UNDUMPABLE, Subject, judge
from kybernate_shim.linux.cgroup.headroom import Headroom
from tests.documentation import ROOT, all_texts, cells, modules, quoted, text_of

PAGE = (ROOT / "docs/gpus.md").read_text()
PREFLIGHT = ROOT / "kybernate_shim/gpu/preflight.py"
GIB = 1 << 30
GPUS = tuple(NodeGpu(f"GPU-{name}", "H200", 80 * GIB, 70 * GIB, False, number) for number, name in enumerate("ab"))
TORCH = Evidence(7, "python", frozenset({"/opt/libcuda.so.1", "/opt/libnccl.so.2", "/opt/libnvshmem_host.so.3"}))
SUBJECT = Subject(
    CudaInfo("580.159.04", 13000, GPUS, ()), [TORCH], [], ["GPU-a"], GIB, Headroom(20 * GIB, "memory.max of /x")
)
RANK = {"environment": {"WORLD_SIZE": "2"}, "segments": frozenset({"/dev/shm/nccl-AbC"})}
UVM = "7f0000000000-7f0000200000 rw-s 00000000 00:05 9    /dev/nvidia-uvm"
# By the beginning of a row: what can be seen of such a process at most, or nothing where it leaves no trace.
UNSEEN: Mapping[str, dict[str, Any]] = {
    "imported memory, in a process": {},
    "memory by `cuMemPoolImport": {"imports": 0},
    "CUDA IPC with a process of another": {"segments": frozenset({"/dev/shm/cuda.shm.0.1"})},
    "CUDA IPC by `cuIpcOpenMemHandle` of the driver": {},
    "managed memory of up to 2 MiB": {"managed_bytes": _managed_bytes(UVM)},
    "peer access between GPUs": {},
    "a pool of `cudaMallocAsync` that is trimmed": {
        "environment": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    },
    "NCCL that is linked statically": {**RANK, "libraries": frozenset({"/opt/libcuda.so.1"})},
    "an environment that the program changes": {
        **RANK,
        "environment": {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0", "WORLD_SIZE": "2"},
    },
    "multicast objects that the program makes": {},
    "MPS with a directory of another name": {"descriptors": frozenset({"/tmp/pipes/control"})},
    "vGPU": {},
    "OpenGL, Vulkan, NVENC": {"descriptors": frozenset({"/dev/nvidia0", "/dev/nvidia-modeset", "/dev/dri/renderD128"})},
    "host memory that was registered": {},
}


def rows(heading: str) -> list[list[str]]:
    """Return the rows of the table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [cells(line) for line in section.splitlines() if line.startswith("| ")][1:]


def refusals() -> dict[str, set[str]]:
    """Return each fact that pre-flight refuses, and whether it is certain or suspected, or both."""
    found: dict[str, set[str]] = {}
    calls = (node for node in ast.walk(modules()[PREFLIGHT]) if isinstance(node, ast.Call))
    for call in calls:
        if ast.unparse(call.func) != "Objection":
            continue
        (certain,) = (word.value for word in call.keywords if word.arg == "certain")
        text = text_of(call.args[0])
        for fact in [text] if text else [fact for fact, _ in UNDUMPABLE.values()]:
            known = found.setdefault(fact, set())
            if isinstance(certain, ast.Constant):
                known.add("certain" if certain.value else "suspected")
            else:
                known.update({"certain", "suspected"})
    return found


def refused_rows() -> dict[str, set[str]]:
    """Return the same of the page, and the errors among it."""
    found: dict[str, set[str]] = {}
    for row in rows("What is refused"):
        (fact,) = quoted(row[3])
        assert fact not in found, f"{fact} has two rows"
        found[fact] = set(re.findall(r"certain|suspected", row[4]))
    return found


def test_every_refusal_of_the_code_has_its_row() -> None:
    page = refused_rows()
    assert {fact: page.get(fact) for fact in refusals()} == refusals()


def test_every_row_is_a_refusal_of_the_code() -> None:
    classes = {node.name for tree in modules().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    others = set(refused_rows()) - set(refusals())
    texts = "".join(all_texts())
    assert [name for name in others - classes if name not in texts] == []
    assert all(refused_rows()[name] == {"certain"} for name in others)


def test_rows_of_what_is_not_detected_are_those_that_are_tested() -> None:
    named = [row[0] for row in rows("What is not detected")]
    assert [next((key for key in UNSEEN if name.startswith(key)), name) for name in named] == list(UNSEEN)


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_said_to_be_undetected_is_not_refused(name: str) -> None:
    """A refusal that is added later belongs into the other table."""
    assert judge(replace(SUBJECT, cuda=[replace(TORCH, **UNSEEN[name])])) == []
