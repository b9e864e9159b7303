"""What would be lost is refused with its evidence, and what was measured to survive is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kybernate_shim.errors import Refused
from kybernate_shim.gpu import preflight
from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.evidence import Evidence
from kybernate_shim.gpu.helper_answers import CudaInfo, NodeGpu
from kybernate_shim.gpu.nccl_safe import NCCL_SAFE
from kybernate_shim.gpu.preflight import Objection, Subject, judge, require_no_more_imports, require_survivable
from kybernate_shim.linux.cgroup.headroom import Headroom

GIB = 1 << 30
NODE = CudaInfo("580.159.04", 13000, (NodeGpu("GPU-a", "H200", 80 * GIB, 70 * GIB, False, 0),), ())
TORCH = frozenset({"/usr/lib/libcuda.so.1", "/opt/torch/libnccl.so.2", "/opt/torch/libnvshmem_host.so.3"})
SUBJECT = Subject(NODE, [Evidence(7, "python", TORCH)], [], ["GPU-a"], 10 * GIB, Headroom(20 * GIB, "memory.max of /x"))
PAIR = frozenset({"/dev/shm/nccl-AbC"})


def ranks(**environment: str) -> list[Evidence]:
    """Two processes with a communicator, as torch makes it: a TCP connection between them and NCCL's segments."""
    one = Evidence(7, "python", TORCH, PAIR, environment=environment, peers=frozenset({8}))
    return [one, replace(one, pid=8, peers=frozenset({7}))]


def subject(**changes: Any) -> Subject:
    return replace(SUBJECT, **changes)


def process(**fields: Any) -> list[Evidence]:
    return [replace(SUBJECT.cuda[0], **fields)]


def test_ordinary_pytorch_process_is_fine() -> None:
    assert judge(SUBJECT) == []


def test_two_processes_that_map_nccl_without_talking_are_fine() -> None:
    assert judge(subject(cuda=[Evidence(7, libraries=TORCH), Evidence(8, libraries=TORCH)])) == []


def test_server_whose_client_does_not_use_nccl_is_fine() -> None:
    server = Evidence(7, "python", TORCH, peers=frozenset({9}))
    assert judge(subject(cuda=[server, Evidence(8, libraries=TORCH)])) == []


@pytest.mark.parametrize(
    ("environment", "survives"),
    [
        ({}, False),
        ({"NCCL_CUMEM_ENABLE": "0"}, False),
        ({"NCCL_P2P_DISABLE": "1"}, False),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"}, True),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, True),
        (dict(NCCL_SAFE), True),
    ],
    ids=str,
)
def test_nccl_is_judged_as_measured(environment: dict[str, str], survives: bool) -> None:
    found = judge(subject(cuda=ranks(**environment)))
    assert [one.certain for one in found] == ([] if survives else [False])
    if not survives:
        assert "/dev/shm/nccl-AbC" in str(found[0])
        assert "TCP connection to process 8" in str(found[0])
        assert "NCCL_P2P_DISABLE=1 NCCL_CUMEM_HOST_ENABLE=0" in str(found[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"segments": PAIR},
        {"sockets": frozenset({"@/tmp/nccl-socket-0-1f"})},
        {"environment": {"WORLD_SIZE": "4"}},
    ],
    ids=str,
)
def test_each_sign_of_a_communicator_is_enough(changes: dict[str, Any]) -> None:
    assert [one.fact for one in judge(subject(cuda=process(**changes)))] == [
        "an NCCL communicator over peer or shared memory"
    ]


@pytest.mark.parametrize(
    ("changes", "fact", "certain", "words"),
    [
        ({"node": replace(NODE, missing_calls=("cuX",))}, "the driver is too old", True, "cuX"),
        ({"denied_drivers": ("580.159.*",)}, "the driver is known to lose or hang processes", True, "580.159.04"),
        ({"node": replace(NODE, gpus=(replace(NODE.gpus[0], mig=True),))}, "MIG", True, "GPU-a"),
        ({"cuda": process(environment={"CUDA_VISIBLE_DEVICES": "MIG-1"})}, "MIG", True, "MIG-1"),
        ({"cuda": process(descriptors=frozenset({"/tmp/nvidia-mps/log"}))}, "MPS", True, "process 7"),
        ({"cuda": process(environment={"CUDA_MPS_PIPE_DIRECTORY": "/p"})}, "MPS", False, "/p"),
        ({"others": process(pid=9, descriptors=frozenset({"anon_inode:[io_uring]"}))}, "io_uring", True, "process 9"),
        ({"cuda": process(descriptors=frozenset({"/dev/infiniband/uverbs0"}))}, "RDMA", True, "NCCL_IB_DISABLE"),
        ({"cuda": process(descriptors=frozenset({"/dev/gdrdrv"}))}, "GDRCopy", True, "process 7"),
        (
            {"cuda": process(descriptors=frozenset({"/dev/nvidia-caps-imex-channels/channel0"}))},
            "multicast or fabric memory", False, "IMEX",
        ),
        (
            {"cuda": process(libraries=TORCH | {"/x/nvshmem_bootstrap_uid.so.3"})},
            "NVSHMEM",
            False,
            "nvshmem_bootstrap_uid",
        ),
        (
            {"cuda": [Evidence(pid, segments=frozenset({"/dev/shm/cuda.shm.0.1"})) for pid in (7, 8)]},
            "CUDA IPC", False, "processes 7, 8",
        ),
        ({"room": Headroom(9 * GIB, "memory.max of /x")}, "not enough host memory", True, "memory.max of /x"),
    ],
)  # fmt: skip
def test_each_fact_is_told_with_its_evidence(changes: dict[str, Any], fact: str, certain: bool, words: str) -> None:
    (found,) = judge(subject(**changes))
    assert (found.fact, found.certain) == (fact, certain)
    assert words in str(found)


def test_instances_of_a_gpu_that_is_not_in_use_do_not_matter() -> None:
    other = NodeGpu("GPU-b", "H200", GIB, GIB, True, 1)
    assert judge(subject(node=replace(NODE, gpus=(*NODE.gpus, other)))) == []


def test_force_overrides_suspicions_only() -> None:
    suspicion, certainty = Objection("a", "b", "c", certain=False), Objection("d", "e", "f", certain=True)
    assert require_survivable([suspicion], force=True) == [suspicion]
    with pytest.raises(Refused, match=r"kybernate.io/force"):
        require_survivable([suspicion], force=False)
    with pytest.raises(Refused, match="d") as refused:
        require_survivable([certainty, suspicion], force=True)
    assert "kybernate.io/force" not in str(refused.value)


def test_managed_memory_is_a_suspicion_with_its_size() -> None:
    (found,) = judge(subject(cuda=process(managed_bytes=64 << 20)))
    assert (found.fact, found.certain) == ("managed memory", False)
    assert "process 7 maps 64 MiB of /dev/nvidia-uvm" in str(found)


def test_imported_memory_is_a_suspicion_with_its_count() -> None:
    (found,) = judge(subject(cuda=process(imports=3)))
    assert (found.fact, found.certain) == ("memory imported from another process", False)
    assert "counts 3 handles and mappings of it in process 7" in str(found)


def test_memory_imported_since_the_first_look_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "imports_of", {7: 2, 8: 1}.__getitem__)
    require_no_more_imports({7: 2, 8: 3}, [7, 8])
    for before in ({7: 1, 8: 1}, {7: 2}):
        with pytest.raises(CudaError, match="imported memory"):
            require_no_more_imports(before, [7, 8])


@pytest.mark.parametrize(
    ("gpus", "nvls", "survives"),
    [(["GPU-a"], "1", True), (["GPU-a", "GPU-b"], "1", False), (["GPU-a", "GPU-b"], "0", True)],
)
def test_communicator_over_several_gpus_must_do_without_multicast(gpus: list[str], nvls: str, survives: bool) -> None:
    environment = {**NCCL_SAFE, "NCCL_NVLS_ENABLE": nvls}
    found = judge(subject(cuda=ranks(**environment), gpus=gpus))
    assert [one.fact for one in found] == ([] if survives else ["multicast objects of NCCL"])


def test_upper_bound_of_hidden_memory_is_a_suspicion() -> None:
    (found,) = judge(subject(vram_bytes=30 * GIB, known=False))
    assert not found.certain
    assert "up to 30720 MiB" in str(found)
