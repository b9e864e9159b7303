"""The shim's files in a bundle, in the forms that others read."""

from __future__ import annotations

import json
import resource
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate_shim.linux.process import boot_id
from kybernate_shim.oci.bundle import Bundle, CleanupRecord
from kybernate_shim.oci.options import RuntimeOptions


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle(tmp_path)


def test_runtime_and_options_have_the_stock_form(bundle: Bundle) -> None:
    options = RuntimeOptions(no_pivot_root=True, io_uid=3, config_body="x = 1")
    bundle.write_runtime(Path("/usr/bin/crun"), options, root=Path("/r"), systemd_cgroup=True)
    assert (bundle.path / "runtime").read_text() == "/usr/bin/crun"
    assert json.loads((bundle.path / "options.json").read_text()) == {
        "no_pivot_root": True,
        "io_uid": 3,
        "binary_name": "/usr/bin/crun",
        "root": "/r",
        "systemd_cgroup": True,
    }
    for name in ("runtime", "options.json"):
        assert stat.S_IMODE((bundle.path / name).stat().st_mode) == 0o600


def test_bundle_for_which_nothing_was_executed_gets_what_others_have(tmp_path: Path) -> None:
    """`delete`, after a restart of containerd, and what looks for the daemon, read it."""
    app = connected(tmp_path, "app")
    app.complete("unix:///s/1")
    assert (app.path / "address").read_text() == "unix:///s/1"
    assert (app.path / "shim-binary-path").read_text() == "/opt/shim"


def test_records_outlive_the_bundle_that_containerd_removes(tmp_path: Path) -> None:
    app = connected(tmp_path, "app")
    app.complete("unix:///s/1")
    app.write_runtime(Path("/usr/bin/crun"), RuntimeOptions(), root=Path("/r"), systemd_cgroup=True)
    for phase in ("create", "checkpoint"):
        app.write_cleanup_record(CleanupRecord(phase=phase))
    assert (app.runtime(), app.options()["root"]) == ("/usr/bin/crun", "/r")
    shutil.rmtree(app.path)
    (left,) = Bundle(tmp_path / "pod").connected().items()
    assert left[0] == "app"
    assert left[1].cleanup_record() == replace(CleanupRecord(phase="checkpoint"), boot=boot_id())
    assert (left[1].runtime(), left[1].options()["root"]) == ("/usr/bin/crun", "/r")
    assert (left[1].path / "config.json").read_text() == "{}"


def test_records_go_with_the_container(tmp_path: Path) -> None:
    app = connected(tmp_path, "app")
    app.complete("unix:///s/1")
    app.write_cleanup_record(CleanupRecord())
    for _ in range(2):
        app.forget_records()
        assert Bundle(tmp_path / "pod").connected() == {}


def test_bundle_that_has_an_address_stays_as_it_is(tmp_path: Path) -> None:
    app = connected(tmp_path, "app")
    (app.path / "address").write_text("unix:///s/0")
    app.complete("unix:///s/1")
    assert {file.name for file in app.path.iterdir()} == {"address", "config.json", "sandbox"}
    assert (app.path / "address").read_text() == "unix:///s/0"


@pytest.mark.parametrize("sandbox", ["", "../pod", "none"])
def test_bundle_without_a_sandbox_beside_it_gets_the_address_alone(tmp_path: Path, sandbox: str) -> None:
    (tmp_path / "shim-binary-path").write_text("/not/this")
    app = connected(tmp_path / "ns", "app", sandbox=sandbox)
    (tmp_path / "ns/pod/shim-binary-path").unlink()
    app.complete("unix:///s/1")
    app.forget_records()
    assert {file.name for file in app.path.iterdir()} == {"address", "config.json", "sandbox"}


def connected(directory: Path, name: str, *, sandbox: str = "pod") -> Bundle:
    """Make a bundle as containerd 2 does for a further container of the pod `sandbox`; that one's is `pod`."""
    for bundle in (directory / "pod", directory / name):
        bundle.mkdir(parents=True, exist_ok=True)
    (directory / "pod/shim-binary-path").write_text("/opt/shim")
    (directory / name / "sandbox").write_text(sandbox)
    (directory / name / "config.json").write_text("{}")
    return Bundle(directory / name)


def test_pid_files_are_read(bundle: Bundle) -> None:
    bundle.init_pid_file.write_text("4711")
    bundle.exec_pid_file("e").write_text("4712\n")
    assert (bundle.init_pid(), bundle.init_pid_or_zero(), bundle.exec_pid("e")) == (4711, 4711, 4712)
    assert bundle.exec_pid_file("e").name == "e.pid"


@pytest.mark.parametrize("content", [None, "", "x", "0", "-1"])
def test_pid_file_without_a_pid_is_an_error(bundle: Bundle, content: str | None) -> None:
    if content is not None:
        bundle.init_pid_file.write_text(content)
    assert bundle.init_pid_or_zero() == 0
    with pytest.raises(OSError, match=r"init\.pid"):
        bundle.init_pid()


def test_process_file_takes_the_terminal_flag_of_the_request(bundle: Bundle) -> None:
    bundle.write_process("e", '{"terminal":true,"args":["ü"],"x-future":1}'.encode(), terminal=False)
    assert json.loads(bundle.process_file("e").read_text()) == {"terminal": False, "args": ["ü"], "x-future": 1}


def test_process_file_has_what_is_edited(bundle: Bundle) -> None:
    bundle.write_process("e", b'{"args":["a"]}', terminal=False, edit=lambda document: document.update(env=["A=1"]))
    assert json.loads(bundle.process_file("e").read_text()) == {"args": ["a"], "env": ["A=1"], "terminal": False}


@pytest.mark.parametrize("process", [b"", b"[]", b"{", b"\xff"])
def test_process_that_is_no_json_object_is_refused(bundle: Bundle, process: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|Expecting|decode"):
        bundle.write_process("e", process, terminal=False)
    assert list(bundle.path.iterdir()) == []


def test_process_file_that_does_not_fit_is_an_error_and_not_left(bundle: Bundle) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(OSError, match="No space left"):
            bundle.write_process("e", b'{"args": ["true"]}', terminal=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(bundle.path.iterdir()) == []


def test_forgotten_exec_leaves_nothing_and_init_keeps_its_pid(bundle: Bundle) -> None:
    bundle.init_pid_file.write_text("1")
    for exec_id in ("e", "init"):
        bundle.write_process(exec_id, b"{}", terminal=False)
        bundle.exec_pid_file(exec_id).write_text("2")
        bundle.forget_exec(exec_id)
        bundle.forget_exec(exec_id)
    assert [entry.name for entry in bundle.path.iterdir()] == ["init.pid"]
    assert bundle.init_pid() == 1


@pytest.mark.parametrize("exec_id", ["", "../x", "a/b", "a\0b"])
def test_exec_id_that_is_no_file_name_is_refused(bundle: Bundle, exec_id: str) -> None:
    with pytest.raises(ValueError, match="exec id"):
        bundle.exec_pid_file(exec_id)


def test_remains_come_back_as_they_were_written(bundle: Bundle) -> None:
    cleanup_record = CleanupRecord(
        runtime="/bin/runc", root="/r", phase="checkpointing", cgroup="/c", locked_pids=(1, 2), temporary=("/t",)
    )
    bundle.write_cleanup_record(cleanup_record)
    read = bundle.cleanup_record()
    assert read is not None
    assert read == CleanupRecord(**{**vars(cleanup_record), "boot": read.boot})
    assert len(read.boot) == 36


def test_remains_of_another_boot_or_another_version(bundle: Bundle) -> None:
    assert bundle.cleanup_record() is None
    bundle.write_cleanup_record(CleanupRecord(phase="restoring"))
    file = bundle.path / "kybernate.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps({"boot": document["boot"], "phase": "restoring", "x-future": 1}))
    assert bundle.cleanup_record() == CleanupRecord(phase="restoring", boot=document["boot"])
    file.write_text(json.dumps({**document, "boot": "earlier"}))
    assert bundle.cleanup_record() is None
    file.write_text("{")
    assert bundle.cleanup_record() is None


def test_modules_for_delete_load_neither_protobuf_nor_asyncio() -> None:
    script = (
        "import sys; import kybernate_shim.oci.bundle, kybernate_shim.oci.commands, kybernate_shim.oci.spec;"
        "sys.exit(any(name in sys.modules for name in ('asyncio', 'google.protobuf', 'tomllib')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
