"""`make demo`: the main job, step by step, in a throw-away node, with words and timings."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.system.cri import Cri
from tests.system.ctr import Ctr, run

COUNTER = ["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done"]


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say what happens and how long it took."""
    print(f"\n── {what}", flush=True)
    begin = time.monotonic()
    yield
    print(f"   {time.monotonic() - begin:.2f} s", flush=True)


def show(text: str) -> None:
    for line in text.strip().splitlines():
        print(f"   {line}", flush=True)


def main() -> int:
    cri, pods = Cri(), Ctr(namespace="k8s.io")
    show(run(["containerd", "--version"]) + run(["containerd-shim-kybernate-v1", "-v"]))
    with told("A pod is started with the runtime class kybernate, and a counter in it"):
        pod = cri.run_pod()
        container = cri.run(pod, "counter", COUNTER)
    try:
        cri.await_log(pod, "counter", "5")
        with told("containerd sees it as any other task"):
            show(pods("task", "ls"))
            pid = str(pods.pid(container))
            show(run(["ps", "-o", "pid,ppid,rss,args", "--ppid", pid, "-p", pid]))
        with told("Its log, as kubectl logs would show it"):
            show("\n".join(cri.log(pod, "counter")[:5]))
        with told("A command in it, as kubectl exec would run it"):
            show(cri.exec(container, "hostname")[1])
    finally:
        with told("The pod is removed"):
            cri.remove_pod(pod)
    with told("A container without a pod: ctr run --runtime io.containerd.kybernate.v1"):
        show(Ctr().run("echo", "hello from a container"))
    print("\nDone: nothing is left of it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
