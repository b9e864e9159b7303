"""What programs around a runtime rely on, under our shim and under containerd's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from kybernate.messages import tasks_pb2 as wire
from kybernate.messages.tasks_pb2_grpc import TasksStub
from tests.system.cri import SOCKET
from tests.system.ctr import BUNDLES, STOCK, CommandFailed, Ctr
from tests.system.programs import script

CREATED = 1  # containerd.v1.types.Status

Use = Callable[[Path], list[str]]


@pytest.fixture
def use(ctr: Ctr, shim_config: Path) -> Use:
    """Return the flags of `ctr run` with which the shim executes the given program as its OCI runtime."""

    def flags(runtime: Path) -> list[str]:
        if ctr.runtime == STOCK:
            return ["--runc-binary", str(runtime)]
        shim_config.write_text(f'runtime = "{runtime}"\n')
        return []

    return flags


def test_runtime_runs_in_the_bundle(ctr: Ctr, use: Use, tmp_path: Path) -> None:
    """Wrappers of runc read ./config.json; the files of the bundle are there from the first call to the last."""
    seen = tmp_path / "seen"
    wrapper = script(
        tmp_path / "wrapper",
        "for word; do case $word in create|start|exec|kill|delete) verb=$word;; esac; done\n"
        f'[ -f config.json ] && echo "$verb $PWD" >> {seen}\nexec runc "$@"',
    )
    id = ctr.new_id()
    with ctr.running("sleep", "1000", flags=use(wrapper), id=id):
        ctr.exec(id, "true")
    bundle = BUNDLES / ctr.namespace / id
    verbs = ("create", "start", "exec", "kill", "delete")
    assert set(seen.read_text().splitlines()) == {f"{verb} {bundle}" for verb in verbs}


def test_missing_runtime_is_named_in_quotes(ctr: Ctr, use: Use) -> None:
    with pytest.raises(CommandFailed, match=r'"no-runc"'):
        ctr.run("true", flags=use(Path("no-runc")))


def test_reason_of_a_failed_create_is_told_when_its_undo_fails_too(ctr: Ctr, use: Use, tmp_path: Path) -> None:
    fails = script(
        tmp_path / "fails",
        'for word; do [ "$before" = --log ] && log=$word; [ "$word" = create ] && verb=create; before=$word; done\n'
        """[ "$verb" ] && echo '{"level":"error","msg":"no room for it"}' >> "$log"\nexit 1""",
    )
    with pytest.raises(CommandFailed, match=r"OCI runtime create failed.*no room for it"):
        ctr.run("true", flags=use(fails))


def test_exec_that_cannot_be_started_is_still_created(ctr: Ctr) -> None:
    metadata = (("containerd-namespace", ctr.namespace),)
    process = {"args": ["/bin/no-such-binary"], "cwd": "/", "user": {"uid": 0, "gid": 0}}
    with ctr.running("sleep", "1000") as id, grpc.insecure_channel(SOCKET) as channel:
        tasks = TasksStub(channel)
        request = wire.ExecProcessRequest(container_id=id, exec_id="e1")
        request.spec.type_url = "types.containerd.io/opencontainers/runtime-spec/1/Process"
        request.spec.value = json.dumps(process).encode()
        tasks.Exec(request, metadata=metadata)
        for _ in range(1 if ctr.runtime == STOCK else 2):  # containerd's own shim crashes when it fails once more
            with pytest.raises(grpc.RpcError, match="no-such-binary"):
                tasks.Start(wire.StartRequest(container_id=id, exec_id="e1"), metadata=metadata)
            found = tasks.Get(wire.GetRequest(container_id=id, exec_id="e1"), metadata=metadata).process
            assert (found.status, found.pid, found.exit_status) == (CREATED, 0, 0)
        ended = tasks.Wait(wire.WaitRequest(container_id=id, exec_id="e1"), metadata=metadata, timeout=10)
        deleted = tasks.DeleteProcess(wire.DeleteProcessRequest(container_id=id, exec_id="e1"), metadata=metadata)
        assert (ended.exit_status, deleted.exit_status, deleted.pid) == (0, 0, 0)
        assert ended.exited_at == deleted.exited_at == found.exited_at


def test_failed_create_is_no_loss_of_output(ours: Ctr, shim_config: Path, tmp_path: Path) -> None:
    """What the runtime has written is in the answer, so that the log has no error of its own for it."""
    log = tmp_path / "log"
    fails = script(tmp_path / "fails", 'echo "the disk is on fire" >&2; exit 3')
    shim_config.write_text(f'runtime = "{fails}"\nlog_file = "{log}"\n')
    with pytest.raises(CommandFailed, match=r"create failed: .* ended with status 3; it wrote: the disk is on fire"):
        ours.run("true")
    assert "output.lost" not in log.read_text()
