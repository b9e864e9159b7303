"""What `kybernate doctor` says of seats, and of what else uses or gives out the same GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kybernate.agent.seat_settings import Seats
from kybernate.doctor import seats
from kybernate.doctor.seats import SeatsFacts, findings, gather
from kybernate_shim.gpu.helper_answers import CudaInfo, NodeGpu

PROFILES = {"profiles": [{"name": "one", "resource": "kyb.ai/one", "groupSize": 1, "seatsPerGroup": 4}]}


def said(facts: SeatsFacts) -> list[str]:
    return [f"{one.verdict} {one.subject}: {one.found}" for one in findings(facts)]


def test_node_without_seats_says_nothing_but_of_mps() -> None:
    assert said(SeatsFacts()) == []
    assert said(SeatsFacts(plugins=("nvidia-gpu.sock",))) == []
    (found,) = said(SeatsFacts(mps=7))
    assert found.startswith("bad MPS: process 7")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (SeatsFacts(mig=("GPU-1",)), "GPU-1 in MIG mode"),
        (SeatsFacts(plugins=("/p/nvidia-gpu.sock",)), "NVIDIA's device plugin advertises"),
        (SeatsFacts(dra=("/r/gpu.nvidia.com-reg.sock",)), "a DRA driver"),
        (SeatsFacts(problem="group G9 has GPU 9, and the node has 1"), "G9"),
    ],
)
def test_each_conflict_is_a_finding_with_advice(facts: SeatsFacts, words: str) -> None:
    bad = [one for one in findings(SeatsFacts(**{**vars(facts), "configured": True})) if one.verdict == "bad"]
    assert [words in one.found and bool(one.advice) for one in bad] == [True]


def test_node_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = NodeGpu("GPU-1", "H200", 1 << 30, 1 << 30, mig=True, number=0)
    monkeypatch.setattr(seats.cuda, "info", lambda: CudaInfo("", 13000, (gpu,), ()))
    for name in ("device-plugins/nvidia-gpu.sock", "plugins_registry/gpu.nvidia.com-reg.sock"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    settings = Seats(configuration=PROFILES, device_plugins=tmp_path / "device-plugins")
    found = gather(settings, tmp_path)
    assert (found.configured, found.seats, found.mig) == (True, 4, ("GPU-1",))
    assert (len(found.plugins), len(found.dra)) == (1, 1)
    missing = {**PROFILES, "gpuTopology": {"groups": [{"name": "G9", "gpus": [9]}]}}
    assert "GPU 9" in gather(Seats(configuration=missing, device_plugins=tmp_path), tmp_path).problem
