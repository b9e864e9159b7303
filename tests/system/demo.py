"""`make demo`: the main job, step by step, in a throw-away node, with words and timings."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.system import node_agent
from tests.system.cri import Cri, Pod
from tests.system.ctr import Ctr, eventually, run

COUNTER = ["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done"]
PYTHON = "localhost:5000/python:latest"
# Memory that no compression could fake, its checksum told again and again.
GIBIBYTE = """
import hashlib, os, time
memory = b"".join(os.urandom(1 << 24) for _ in range(64))
number = 0
while True:
    number += 1
    print(number, len(memory), hashlib.blake2b(memory).hexdigest()[:16], flush=True)
    time.sleep(0.2)
"""


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


class Story:
    """A pod that is checkpointed, removed, and comes back as another pod."""

    def __init__(self, cri: Cri, name: str, command: list[str], image: str) -> None:
        self.cri = cri
        self.name = name
        self.command = command
        self.container_image = image
        self.checkpoint = Path(f"/var/lib/kybernate/checkpoints/default/{name}")

    def tell(self) -> None:
        with told(f"A pod is started with the runtime class kybernate, and the container `{self.name}` in it"):
            first = self.cri.run_pod()
            container = self.cri.run(first, self.name, self.command, image=self.container_image)
        self._show_log(first, 5)
        show(Ctr(namespace="k8s.io")("task", "ps", container))
        with told("It is checkpointed: memory, open files, changed files, log stream"):
            show(run(["kybernate", "checkpoint", container, self.checkpoint.name, "--exit"]))
        last = self.cri.log(first, self.name)[-1]
        with told("The pod is deleted; only the checkpoint image is left"):
            self.cri.remove_pod(first)
            show(run(["du", "-sh", str(self.checkpoint)]))
        with told("A new pod is started with the annotation kybernate.io/restore-from"):
            second = self.cri.run_pod(annotations={"kybernate.io/restore-from": self.checkpoint.name})
            container = self.cri.run(second, self.name, ["/its/own/command/never/runs"], image=self.container_image)
        with told(f"It goes on after {last!r}, under a new address and hostname"):
            self._show_log(second, 3)
            show(self.cri.exec(container, "cat", "/proc/sys/kernel/hostname")[1])
        self._prove(last, self.cri.log(second, self.name)[0])
        self.cri.remove_pod(second)
        shutil.rmtree(self.checkpoint)

    def _show_log(self, pod: Pod, lines: int) -> None:
        eventually(lambda: len(self.cri.log(pod, self.name)) >= lines, seconds=120)
        show("\n".join(self.cri.log(pod, self.name)[:lines]))

    def _prove(self, last: str, first: str) -> None:
        """Fail unless the first line of the new log follows the last one of the old log, with the same content."""
        (number, *content), (following, *same) = last.split(), first.split()
        assert int(following) == int(number) + 1, f"{first!r} does not follow {last!r}"
        assert same == content, f"{first!r} has another content than {last!r}"


def tell_of_the_agent() -> None:
    """A container whose checkpoint is an operation of the node agent, which is killed meanwhile."""
    ctr = Ctr()
    again = ctr.new_id("again")
    with node_agent.short_place() as place, ctr.running(*COUNTER) as id:
        image = place / "image"
        with told("The node agent is started; it finds the container that is there"):
            agent = node_agent.NodeAgent(place)
            agent.start()
            agent.wait_ready()
            os.environ["KYBERNATE_AGENT"] = agent.address
            show(run(["kybernate", "ps"]))
        with told("A checkpoint is an operation: it is in the journal before it begins, and has an identifier"):
            operation = run(["kybernate", "checkpoint", id, str(image), "--exit", "--no-wait"]).strip()
            show(operation)
        with told("The agent is killed with SIGKILL, and started again"):
            agent.stop(signal.SIGKILL)
            agent.start()
            agent.wait_ready()
        with told("It has found what became of the operation"):
            show(run(["kybernate", "wait", operation]))
        with told("The container comes back by the agent"):
            show(run(["kybernate", "restore", str(image), "-d", "--name", again]))
            show(run(["kybernate", "ops"]))
            show(run(["kybernate", "events", "operation.*"]))
        ctr.remove(again)
        agent.stop()
        del os.environ["KYBERNATE_AGENT"]


def main() -> int:
    cri = Cri()
    show(run(["containerd", "--version"]) + run(["containerd-shim-kybernate-v1", "-v"]) + run(["criu", "--version"]))
    Story(cri, "counter", COUNTER, "localhost:5000/busybox:latest").tell()
    print("\n═══ The same with a Python process that holds 1 GiB of random memory and tells its checksum", flush=True)
    Story(cri, "gibibyte", ["python3", "-c", GIBIBYTE], PYTHON).tell()
    with told("A container without a pod: ctr run --runtime io.containerd.kybernate.v1"):
        show(Ctr().run("echo", "hello from a container"))
    print("\n═══ Operations of the node agent", flush=True)
    tell_of_the_agent()
    print("\nDone: all came back where they were, and nothing is left of it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
