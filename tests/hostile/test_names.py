"""Names that a tenant chooses and the kernel shows are any bytes: they harm no operation of others."""

from __future__ import annotations

import os
from pathlib import Path

from kybernate_shim.checkpoint.sockets import container_sockets
from kybernate_shim.gpu.evidence import look
from tests.hostile.tenant import Tenant
from tests.system.checkpoints import PYTHON, kybernate
from tests.system.cri import Pod
from tests.system.ctr import Ctr, finished

# Threads, mapped files, sockets, files and environment with names that are no UTF-8, or have characters that end lines.
NAMING = """
import ctypes, mmap, os, socket, time
ctypes.CDLL(None).prctl(15, b"\\xff\\x1cUid:\\t0")
os.mkdir("/tmp/odd"); os.chdir(b"/tmp/odd")
open(b"file \\xff\\xc2\\x85", "wb").write(bytes(4096))
kept = mmap.mmap(os.open(b"file \\xff\\xc2\\x85", os.O_RDONLY), 4096, prot=mmap.PROT_READ)
one = socket.socket(socket.AF_UNIX); one.bind(b"\\0odd \\xff"); one.listen()
two = socket.socket(socket.AF_UNIX); two.bind(b"socket \\xff"); two.listen()
print("ready", flush=True)
while True: time.sleep(1)
"""


QUIET = "import time; print('ready', flush=True); time.sleep(600)"


def first_process(tenant: Tenant, pod: Pod, name: str, program: str) -> tuple[str, int]:
    id = tenant.cri.run(pod, name, ["python3", "-c", program], image=PYTHON)
    tenant.cri.await_log(pod, name, "ready")
    return id, Ctr(namespace="k8s.io").pid(id)


def test_names_in_a_pods_network_are_no_trouble_of_its_other_containers(tenant: Tenant, tmp_path: Path) -> None:
    pod = tenant.pod()
    odd, pid = first_process(tenant, pod, "odd", NAMING)
    other, quiet = first_process(tenant, pod, "other", QUIET)
    assert [one.pid for one in look([quiet])] == [quiet]
    assert [one.pid for one in look([pid])] == [pid]
    bound = {os.fsencode(one.local) for one in container_sockets([pid])}
    assert b"@odd \xff" in bound
    kybernate("checkpoint", other, str(tmp_path / "other"))
    done = finished(["kybernate", "checkpoint", odd, str(tmp_path / "odd")])
    assert done.returncode == 0 or b"codec" not in done.stderr, done.stderr
