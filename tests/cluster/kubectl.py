"""kubectl as a user types it, with answers and failures that a test can read.

kubectl.apply(pod("counter", "sh", "-c", "…", handler="kybernate"))
kubectl.ready("pod/counter")
assert "1" in kubectl.logs("counter")
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.lab.cluster.addresses import ADMINISTRATOR

Object = dict[str, Any]


class KubectlFailed(AssertionError):
    """kubectl ended with another status than 0. `said`: what it wrote to stderr."""

    def __init__(self, argv: list[str], status: int, said: str) -> None:
        super().__init__(f"{' '.join(argv)} ended with {status}: {said}")
        self.said = said


@dataclass(frozen=True)
class Kubectl:
    """kubectl in one namespace, as the owner of a kubeconfig file: the administrator, where none is named."""

    namespace: str = "default"
    config: Path = ADMINISTRATOR

    def within(self, namespace: str) -> Kubectl:
        """Return the same user's kubectl in another namespace."""
        return replace(self, namespace=namespace)

    def argv(self, *words: str) -> list[str]:
        """Return the whole command, for a test that runs it by itself."""
        return ["kubectl", f"--kubeconfig={self.config}", f"--namespace={self.namespace}", *words]

    def __call__(self, *words: str, text: str | None = None, seconds: float = 120) -> str:
        """Run kubectl with `text` on its stdin and return what it prints. Raises KubectlFailed."""
        argv = self.argv(*words)
        done = subprocess.run(argv, input=text or "", capture_output=True, text=True, timeout=seconds, check=False)
        if done.returncode:
            raise KubectlFailed(argv, done.returncode, done.stderr)
        return done.stdout

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Run kubectl in the background with pipes, as for attach and port-forward; the caller ends it."""
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(self.argv(*words), text=True, **{**pipes, **options})

    def refused(self, *words: str, text: str | None = None) -> str:
        """Return the reason for which a command fails; AssertionError where it succeeds."""
        try:
            said = self(*words, text=text)
        except KubectlFailed as failure:
            return failure.said
        raise AssertionError(f"kubectl {' '.join(words)} was not refused: {said}")

    def apply(self, *objects: Object | str) -> None:
        """Apply objects, or YAML as text."""
        for text in self._texts(objects):
            self("apply", "-f", "-", text=text)

    def create(self, *objects: Object | str) -> None:
        """Create objects that do not exist."""
        for text in self._texts(objects):
            self("create", "-f", "-", text=text)

    def _texts(self, objects: tuple[Object | str, ...]) -> list[str]:
        items = [one for one in objects if not isinstance(one, str)]
        texts = [one for one in objects if isinstance(one, str)]
        return texts + ([json.dumps({"apiVersion": "v1", "kind": "List", "items": items})] if items else [])

    def get(self, *words: str) -> Object:
        """Return an object, or a List of them: `get("pod", "counter")`, `get("pods", "-l", "app=web")`."""
        found: Object = json.loads(self("get", *words, "-o", "json"))
        return found

    def items(self, *words: str) -> list[Object]:
        """Return the objects of a List."""
        found: list[Object] = self.get(*words)["items"]
        return found

    def node(self, pod: str) -> str:
        """Return the name of the node on which a pod is."""
        return str(self.get("pod", pod)["spec"]["nodeName"])

    def wait(self, condition: str, *targets: str, seconds: float = 60) -> None:
        """Wait for a condition as `kubectl wait --for` has it: `condition=Ready`, `jsonpath={.status.phase}=Failed`."""
        self("wait", f"--for={condition}", f"--timeout={seconds:g}s", *targets, seconds=seconds + 30)

    def ready(self, *targets: str, seconds: float = 60) -> None:
        """Wait until pods are ready: `pod/counter`."""
        self.wait("condition=Ready", *targets, seconds=seconds)

    def phase(self, pod: str, phase: str, seconds: float = 60) -> None:
        """Wait until a pod has a phase, such as Succeeded."""
        self.wait(f"jsonpath={{.status.phase}}={phase}", f"pod/{pod}", seconds=seconds)

    def rolled_out(self, target: str, seconds: float = 90) -> None:
        """Wait until all replicas of a workload are as its object wants them."""
        self("rollout", "status", target, f"--timeout={seconds:g}s", seconds=seconds + 30)

    def logs(self, target: str, *words: str) -> str:
        return self("logs", target, *words)

    def exec(self, target: str, *argv: str, container: str = "", text: str | None = None) -> str:
        """Run a command in a container of a pod and return its stdout."""
        options = [*(["-i"] if text is not None else []), *([f"--container={container}"] if container else [])]
        return self("exec", *options, target, "--", *argv, text=text)

    def delete(self, *targets: str, now: bool = True) -> None:
        """Delete objects and wait until they are gone; pods have a second to end, or else their grace period."""
        self("delete", "--ignore-not-found", *(["--now"] if now else []), *targets)

    def events(self) -> str:
        """Return the namespace's events, the oldest first."""
        return self("events")


def last(kubectl: Kubectl, name: str) -> int:
    """Return the last number that a pod has counted to in its log, 0 before the first."""
    return int((kubectl.logs(name, "--tail=1").split() or ["0"])[0])
