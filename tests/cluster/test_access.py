"""What a user does with a running pod: logs, exec, attach, port-forward, cp, debug. The same under both handlers."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.cluster.kubectl import Kubectl
from tests.cluster.pods import container, pod
from tests.system.ctr import eventually

OF_LOG = {"terminationMessagePolicy": "FallbackToLogsOnError"}
ECHO = "while read line; do echo got $line; done; echo ended"
SERVE = "echo hello >/tmp/index.html; exec busybox httpd -f -p 8080 -h /tmp"


@contextmanager
def started(kubectl: Kubectl, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run kubectl in the background for the time of the block."""
    process = kubectl.start(*words)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_logs_follow_and_of_the_container_before(kubectl: Kubectl, handler: str) -> None:
    script = "echo out; echo err >&2; test -e /data/second || { touch /data/second; exit 3; }; sleep 1; echo last"
    kubectl.apply(
        pod(
            "logs", handler=handler, restartPolicy="OnFailure", volumes=[{"name": "data", "emptyDir": {}}],
            containers=[container("main", "sh", "-c", script, volumeMounts=[{"name": "data", "mountPath": "/data"}])],
        )
    )  # fmt: skip
    kubectl.wait("jsonpath={.status.containerStatuses[0].restartCount}=1", "pod/logs")
    assert sorted(kubectl.logs("logs", "--previous").split()) == ["err", "out"]
    followed = kubectl.logs("logs", "--follow")
    assert sorted(followed.split()) == ["err", "last", "out"]
    assert kubectl.logs("logs", "--tail=1") == "last\n"
    stamp = kubectl.logs("logs", "--timestamps", "--tail=1").split()[0]
    assert stamp.startswith("20")
    assert "T" in stamp


def test_exec_has_streams_status_and_a_terminal(kubectl: Kubectl, handler: str) -> None:
    kubectl.apply(pod("exec", handler=handler))
    kubectl.ready("pod/exec")
    assert kubectl.exec("exec", "cat", text="through\n") == "through\n"
    assert "exit code 7" in kubectl.refused("exec", "exec", "--", "sh", "-c", "exit 7")
    said = kubectl.refused("exec", "exec", "--", "sh", "-c", "echo complaint >&2; exit 1")
    assert said.splitlines()[0] == "complaint"
    assert "no such file or directory" in kubectl.refused("exec", "exec", "--", "/no/such/program")
    terminal = ["script", "-qec", " ".join(kubectl.argv("exec", "-it", "exec", "--", "tty")), "/dev/null"]
    with subprocess.Popen(terminal, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "/dev/pts/" in process.stdout.read()  # before the end of its input, which would end the terminal
    large = kubectl.exec("exec", "sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x")
    assert large == "x" * 3_000_000


def test_attach_reaches_the_program(kubectl: Kubectl, handler: str) -> None:
    kubectl.apply(
        pod("attach", handler=handler, containers=[container("main", "sh", "-c", ECHO, stdin=True, stdinOnce=True)])
    )
    kubectl.ready("pod/attach")
    with started(kubectl, "attach", "-i", "-q", "attach") as attached:
        said, _ = attached.communicate("one\ntwo\n", timeout=60)
    assert said.endswith("got two\nended\n")
    kubectl.phase("attach", "Succeeded")
    assert kubectl.logs("attach") == "got one\ngot two\nended\n"


def test_port_forward_passes_both_ways(kubectl: Kubectl, handler: str) -> None:
    kubectl.apply(pod("web", "sh", "-c", SERVE, handler=handler))
    kubectl.ready("pod/web")
    with started(kubectl, "port-forward", "pod/web", ":8080") as forward:
        assert forward.stdout is not None
        port = int(forward.stdout.readline().split("127.0.0.1:")[1].split()[0])

        def fetched() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20) as answer:
                return str(answer.read().decode())

        assert [fetched() for _ in range(3)] == ["hello\n"] * 3
        with closing(socket.create_connection(("127.0.0.1", port), timeout=20)) as half_closed:
            half_closed.sendall(b"GET / HTTP/1.0\r\n\r\n")
            half_closed.shutdown(socket.SHUT_WR)
            assert half_closed.makefile("rb").read().endswith(b"hello\n")


def test_cp_there_and_back(kubectl: Kubectl, handler: str, tmp_path: Path) -> None:
    kubectl.apply(pod("cp", handler=handler))
    kubectl.ready("pod/cp")
    sent = tmp_path / "sent"
    sent.mkdir()
    (sent / "large").write_bytes(bytes(range(256)) * 8192)
    (sent / "small").write_text("small\n")
    kubectl("cp", str(sent), "cp:/tmp/")
    assert kubectl.exec("cp", "sh", "-c", "wc -c </tmp/sent/large; cat /tmp/sent/small").split() == ["2097152", "small"]
    kubectl("cp", "cp:/tmp/sent", str(tmp_path / "back"))
    assert (tmp_path / "back/large").read_bytes() == (sent / "large").read_bytes()


def test_debug_container_sees_the_programs_processes(kubectl: Kubectl, handler: str) -> None:
    kubectl.apply(pod("target", "sleep", "100000", handler=handler))
    kubectl.ready("pod/target")
    kubectl(
        "debug", "target", "--image=localhost:5000/busybox:latest", "--image-pull-policy=IfNotPresent",
        "--target=main", "--container=debugger", "--profile=general", "--", "sleep", "1000",
    )  # fmt: skip
    kubectl.wait("jsonpath={.status.ephemeralContainerStatuses[0].state.running.startedAt}", "pod/target")
    assert "sleep 100000" in kubectl.exec("target", "ps", "-o", "args", container="debugger")
    assert kubectl.exec("target", "sh", "-c", "ls /proc/1/root/bin/busybox", container="debugger").strip()
    assert kubectl.get("pod", "target")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_termination_message_is_the_file_or_the_end_of_the_log(kubectl: Kubectl, handler: str) -> None:
    kubectl.apply(
        pod(
            "message", handler=handler,
            containers=[
                container("file", "sh", "-c", "echo of the file >/dev/termination-log; exit 4"),
                container("log", "sh", "-c", "echo of the log; exit 5", **OF_LOG),
            ],
        )
    )  # fmt: skip
    kubectl.phase("message", "Failed")
    states = {
        one["name"]: one["state"]["terminated"] for one in kubectl.get("pod", "message")["status"]["containerStatuses"]
    }
    assert [(states[name]["message"], states[name]["exitCode"]) for name in ("file", "log")] == [
        ("of the file\n", 4),
        ("of the log\n", 5),
    ]


def test_stats_and_top_of_kubelet(kubectl: Kubectl, handler: str) -> None:
    """What `kubectl top` and metrics-server read: kubelet's summary, by containerd's figures of the shim."""
    kubectl.apply(pod("busy", "sh", "-c", "while :; do :; done", handler=handler))
    kubectl.ready("pod/busy")
    node = kubectl.get("pod", "busy")["spec"]["nodeName"]

    def used() -> int:
        summary = json.loads(kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy/stats/summary"))
        ours = [one for one in summary["pods"] if one["podRef"]["namespace"] == kubectl.namespace]
        return int(ours[0]["containers"][0].get("cpu", {}).get("usageCoreNanoSeconds", 0)) if ours else 0

    assert eventually(lambda: used() > 100_000_000, seconds=60, pause=1)
