"""A suspended container comes back by the next use of its GPU, and no container has more VRAM than it has declared."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.fakes.cuda import Gpus
from tests.system import gpu, node_agent
from tests.system.checkpoints import PYTHON, kybernate
from tests.system.ctr import Ctr, eventually
from tests.system.node_agent import NodeAgent

WAKES = ["--annotation", "kybernate.io/wake-on-use=true"]
LIBRARY = ["--annotation", "kybernate.io/vram=256Mi"]  # which loads it, without an arena
PIECE_MIB = 2


@pytest.fixture
def agent(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeAgent]:
    with node_agent.short_place() as place, node_agent.running(place) as one:
        monkeypatch.setenv("KYBERNATE_AGENT", one.address.removeprefix("unix:"))
        yield one


def state_of(id: str) -> str:
    (found,) = [one for one in json.loads(kybernate("ps", "-o", "json")) if one["container"] == id]
    return str(found["gpu"])


@pytest.mark.parametrize("library", [LIBRARY, []], ids=["library", "from_outside"])
def test_next_use_brings_a_suspended_container_back(ctr: Ctr, agent: NodeAgent, library: Sequence[str]) -> None:
    with gpu.holding(ctr, 2, flags=[*WAKES, *library]) as container:
        for _ in range(3):
            kybernate("suspend", container.id)
            assert state_of(container.id) == "suspended"
            assert container.is_right()
        verbs = [one["verb"] for one in json.loads(kybernate("ops", "-o", "json")) if one["container"] == container.id]
        assert verbs.count("wake") == 3


def test_container_that_is_put_to_sleep_at_work_stays_asleep(ctr: Ctr, agent: NodeAgent) -> None:
    """It waits in the driver from the beginning; another one's wake shows that the agent has looked since."""
    with gpu.computing(ctr, flags=WAKES) as busy, gpu.holding(ctr, 1, flags=WAKES) as other:
        kybernate("sleep", busy.id)
        for _ in range(2):
            kybernate("sleep", other.id)
            assert other.is_right()
        assert state_of(busy.id) == "suspended"
        busy.stands_still()
        kybernate("wake", busy.id)
        busy.computes_on()


def test_use_of_a_container_without_the_annotation_waits(ctr: Ctr, agent: NodeAgent) -> None:
    with gpu.holding(ctr, 1) as container, gpu.holding(ctr, 1, flags=WAKES) as other:
        kybernate("suspend", container.id)
        container.begin("content")
        kybernate("suspend", other.id)
        assert other.is_right()
        assert state_of(container.id) == "suspended"
        kybernate("resume", container.id)
        assert container.told() == "1"


def test_container_gets_what_it_has_declared_and_no_more(ctr: Ctr, agent: NodeAgent, tmp_path: Path) -> None:
    limit = ["--annotation", f"kybernate.io/vram={8 * PIECE_MIB}Mi"]
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    flags = [*gpu.mounts(), *gpu.visible(0), *limit]
    more = subprocess.run(
        own.run_argv(own.new_id("gpu"), "python3", f"{gpu.INSIDE}/holds.py", "9", flags=["--rm", *flags]),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert more.returncode != 0
    assert "cuMemAlloc_v2" in more.stderr
    with gpu.holding(ctr, 8, flags=limit) as container:
        kybernate("checkpoint", container.id, str(tmp_path / "image"), "--exit")
        with gpu.holding_again(ctr, tmp_path / "image", container, flags=limit):
            assert container.is_right()
            assert container.ask("look") == f"0 of {8 * PIECE_MIB << 20}"


def test_exec_counts_for_what_its_container_has_declared(ctr: Ctr, agent: NodeAgent) -> None:
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    with gpu.holding(ctr, 6, flags=["--annotation", f"kybernate.io/vram={8 * PIECE_MIB}Mi"]) as container:
        holds = [["sh", "-c", f"exec python3 {gpu.INSIDE}/holds.py {pieces} < /dev/null"] for pieces in (2, 3)]
        assert own.exec(container.id, *holds[0]) == "ready\n"
        more = subprocess.run(
            own.exec_argv(container.id, *holds[1]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert more.returncode != 0
        assert "cuMemAlloc_v2 failed: 2" in more.stderr
        assert container.is_right()


KERNEL = """
import json, sys
sys.path[:0] = {packages!r}
from ipykernel.kernelapp import launch_new_instance
launch_new_instance(["-f", {connection!r}])
"""
CELLS = (
    "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); context, memory = ctypes.c_void_p(), ctypes.c_uint64()",
    "assert not cuda.cuInit(0) and not cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)",
    "assert not cuda.cuCtxSetCurrent(context)",
    "assert not cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(2 << 20))",
    "assert not cuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(7), ctypes.c_size_t(2 << 20))",
)
READ = """
copy = ctypes.create_string_buffer(2 << 20)
assert not cuda.cuMemcpyDtoH_v2(copy, memory, ctypes.c_size_t(2 << 20))
print(set(copy.raw))
"""


def test_cells_of_a_notebook_run_by_wake_on_use(ctr: Ctr, agent: NodeAgent) -> None:
    """A kernel of Jupyter's in a container, which gets messages as from a notebook."""
    import sysconfig

    from jupyter_client.blocking import BlockingKernelClient
    from jupyter_client.connect import write_connection_file

    packages = sysconfig.get_paths()["purelib"]
    own, id = Ctr(ctr.runtime, ctr.namespace, PYTHON), ctr.new_id("gpu")
    place = gpu.GPUS / f"{id}.notebook"
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    connection, _ = write_connection_file(str(place / "kernel.json"), ip=str(place / "socket"), transport="ipc")
    Path(connection).chmod(0o644)
    script = KERNEL.format(packages=[packages], connection=connection)
    flags = [
        *gpu.mounts(),
        *gpu.visible(0),
        *WAKES,
        *LIBRARY,
        "--env",
        f"HOME={place}",
        "--env",
        "IPYTHONDIR=/tmp/ipython",
    ]
    flags += ["--log-uri", f"file:///tmp/{id}.out"]
    flags += ["--mount", f"type=bind,src={packages},dst={packages},options=rbind:ro"]
    # What the image has not of the libraries that the packages need, of the same Debian.
    flags += ["--mount", "type=bind,src=/usr/lib,dst=/opt/lib,options=rbind:ro"]
    flags += ["--env", "LD_LIBRARY_PATH=/opt/lib/x86_64-linux-gnu"]
    client = BlockingKernelClient(connection_file=connection)
    client.load_connection_file()
    try:
        with own.running("python3", "-c", script, id=id, flags=flags):
            eventually(lambda: any(place.glob("socket-*")), seconds=30)
            for path in place.glob("socket-*"):
                path.chmod(0o777)
            client.start_channels()
            client.wait_for_ready(timeout=60)

            def run(cell: str) -> str:
                said: list[str] = []
                reply = client.execute_interactive(
                    cell,
                    timeout=60,
                    output_hook=lambda message: said.append(message["content"].get("text", "")),
                )
                assert reply["content"]["status"] == "ok", reply["content"]
                return "".join(said)

            for cell in CELLS:
                run(cell)
            for _ in range(2):
                kybernate("sleep", id)
                assert run("print(1 + 1)") == "2\n"
                assert state_of(id) == "suspended"
                assert run(READ) == "{7}\n"
                eventually(lambda: state_of(id) == "attached")
    finally:
        client.stop_channels()
        log = Path(f"/tmp/{id}.out")
        print(log.read_text()[-3000:] if log.exists() else "")
        log.unlink(missing_ok=True)
