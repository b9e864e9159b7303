"""`kybernate topology`: the matrix, the groups and the document."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from kybernate.cli.application import application
from kybernate.node import cuda
from kybernate_shim.gpu.helper_answers import CudaInfo, NodeGpu

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads((ROOT / "docs/schemas/kybernate.schema.json").read_text())


def gpu(number: int, **links: str) -> NodeGpu:
    paths = {f"GPU-{name[1:]}": path for name, path in links.items()}
    return NodeGpu(f"GPU-{number}", "H200", 1, 1, mig=False, number=number, node=number // 2, links=paths)


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (
        gpu(0, g1="PIX", g2="NV18", g3="SYS"),
        gpu(1, g0="PIX", g2="SYS", g3="NV18"),
        gpu(2, g0="NV18", g1="SYS", g3="PIX"),
        gpu(3, g0="SYS", g1="NV18", g2="PIX"),
    )
    monkeypatch.setattr(cuda, "info", lambda: CudaInfo("580", 13000, gpus, ()))


def run(*words: str) -> str:
    return CliRunner().invoke(application(["topology", *words]), ["topology", *words]).stdout


def test_table_is_as_nvidia_smi_has_it() -> None:
    lines = run().splitlines()
    assert lines[0].split() == ["GPU", "GPU0", "GPU1", "GPU2", "GPU3", "NUMA", "GROUPS"]
    assert lines[1].split() == ["GPU0", "X", "PIX", "NV18", "SYS", "0", "G0", "G02", "G0123"]
    assert any(line.startswith("NV# = ") for line in lines)
    assert not any(line.startswith("PHB") for line in lines)


def test_document_has_a_schema() -> None:
    found = json.loads(run("-o", "json"))
    for one in found:
        jsonschema.validate(one, {**SCHEMA, "$ref": "#/$defs/topology"})
    assert found[3]["links"][1] == {"gpu": 1, "path": "NV18"}
    assert run("-o", "name").split() == [f"GPU-{number}" for number in range(4)]


def test_groups_of_a_file_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "seats.yaml"
    file.write_text(
        "profiles: [{name: two, resource: kyb.ai/two, groupSize: 2, seatsPerGroup: 2}]\n"
        "gpuTopology: {groups: [{name: A, gpus: [0, 1]}]}\n"
    )
    lines = run("--file", str(file)).splitlines()
    assert lines[1].split()[-1] == "A"
    assert lines[3].split()[-1] == "-"
