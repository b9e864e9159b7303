"""CRIU's configuration files, its versions and its logs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.checkpoint.criu.claim import claim_config, users_file
from kybernate_shim.checkpoint.criu.config import (
    CriuOptions,
    criu_version,
    errors_of,
    explain,
    line,
    parse_version,
    refuse_cuda_plugin,
    without,
    write_config,
)
from kybernate_shim.config import Config
from kybernate_shim.errors import Refused
from kybernate_shim.linux.children import Finished, ProgramTimedOut
from kybernate_shim.oci.spec import Spec

LOG = """\
(00.000012) Version: 4.1.1 (gitid 0)
(00.000809) Will skip in-flight TCP connections
(00.001000) Error (criu/util.c:1533): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.108391) Warn  (criu/cgroup.c:1): something odd
(00.200000)      1: Error (criu/files-reg.c:1790): Can't lookup mount=91 for fd=2 path=/run/t/err
(00.200001)      1: Error (criu/files-reg.c:1790): Can't lookup mount=91 for fd=2 path=/run/t/err
(00.323832) Error (criu/cr-dump.c:2111): Dumping FAILED.
"""


class Answers:
    """A runner that has one answer for each command line."""

    def __init__(self, **answers: Finished | Exception) -> None:
        self.answers = answers

    async def run(self, argv: Sequence[str], *, timeout: float | None = None) -> Finished:
        answer = self.answers["version" if argv[1] == "--version" else argv[1]]
        if isinstance(answer, Exception):
            raise answer
        return answer


def finished(status: int = 0, stdout: str = "", stderr: str = "") -> Finished:
    return Finished(("criu",), status, stdout, stderr)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_defaults_close_connections_and_lock_nothing() -> None:
    assert CriuOptions().lines() == [
        "tcp-close",
        "skip-in-flight",
        "file-locks",
        "link-remap",
        "ghost-limit 536870912",
        "timeout 60",
        "network-lock skip",
    ]


def test_every_option_has_its_line() -> None:
    options = CriuOptions(
        tcp="established",
        network_lock=True,
        shell_job=True,
        file_locks=False,
        link_remap=False,
        ext_unix_sk=True,
        ghost_limit=1,
        timeout=2,
        libdir=Path("/usr/lib/criu"),
        extra=("external mnt[/a]:/b",),
    )
    assert options.lines() == [
        "tcp-established",
        "skip-in-flight",
        "shell-job",
        "ext-unix-sk",
        "ghost-limit 1",
        "timeout 2",
        "libdir /usr/lib/criu",
        "external mnt[/a]:/b",
    ]


@pytest.mark.parametrize(
    "value", ["/a b", "/a#b", '/a"b', "/a\nexec-cmd", "/a\tb", "/a\rb", "/a\x00b", "-x", "/a\u2028b"]
)
def test_a_value_that_criu_would_cut_is_refused(value: str) -> None:
    with pytest.raises(Refused, match="libdir"):
        line("libdir", value)


def test_network_lock_is_kept_out_of_the_runtimes_file(tmp_path: Path) -> None:
    written = write_config(tmp_path, CriuOptions(), [])
    assert "network-lock skip" in written.lines
    assert "network-lock skip" not in lines_of(tmp_path / "kybernate-criu.conf")
    assert lines_of(tmp_path / "kybernate-criu-early.conf") == ["network-lock skip"]
    assert written.environment == {"CRIU_CONFIG_FILE": str(tmp_path / "kybernate-criu-early.conf")}


def test_without_a_directory_of_plugins_criu_finds_an_empty_one(tmp_path: Path) -> None:
    for _ in range(2):
        written = write_config(tmp_path, CriuOptions(), [])
        (chosen,) = [text.split()[1] for text in written.lines if text.startswith("libdir ")]
        assert list(Path(chosen).iterdir()) == []
        refuse_cuda_plugin(written)


@pytest.mark.parametrize("by", ["setting", "users file"])
def test_the_cuda_plugin_is_refused_by_name(tmp_path: Path, by: str) -> None:
    plugin, users = tmp_path / "plugins/cuda_plugin.so", tmp_path / "runc.conf"
    plugin.parent.mkdir()
    users.write_text(f"libdir {plugin.parent}\n" if by == "users file" else "")
    options = CriuOptions(libdir=plugin.parent if by == "setting" else None)
    refuse_cuda_plugin(write_config(tmp_path, options, [users]))
    plugin.touch()
    with pytest.raises(Refused, match=f"would load {plugin}"):
        refuse_cuda_plugin(write_config(tmp_path, options, [users]))


def test_the_users_file_has_the_last_word(tmp_path: Path) -> None:
    users = tmp_path / "runc.conf"
    users.write_text("# ours\n\n  tcp-established\nno-file-locks\nghost-limit 5\nnetwork-lock nftables\nverbosity 4\n")
    written = write_config(tmp_path, CriuOptions(), [users, tmp_path / "absent", None])
    assert lines_of(tmp_path / "kybernate-criu.conf") == [
        "skip-in-flight",
        "link-remap",
        "timeout 60",
        f"libdir {tmp_path / 'kybernate-criu-plugins'}",
        "tcp-established",
        "no-file-locks",
        "ghost-limit 5",
        "verbosity 4",
    ]
    assert lines_of(tmp_path / "kybernate-criu-early.conf") == ["network-lock nftables"]
    assert len(written.lines) == 9


@pytest.mark.parametrize(
    "option",
    ["action-script /x", "exec-cmd", "lsm-profile a", "root /", "--libdir /x", "ACTION-SCRIPT /x", "no-action-script"],
)
def test_an_option_that_could_run_programs_is_refused(tmp_path: Path, option: str) -> None:
    users = tmp_path / "runc.conf"
    users.write_text(f"tcp-close\n{option}\n")
    with pytest.raises(Refused, match=r"is not allowed|cannot read"):
        write_config(tmp_path, CriuOptions(), [users])
    assert not (tmp_path / "kybernate-criu.conf").exists()


def test_a_file_that_others_can_write_has_no_say(tmp_path: Path) -> None:
    users = tmp_path / "runc.conf"
    users.write_text("tcp-close\n")
    users.chmod(0o666)
    with pytest.raises(Refused, match=r"mode 0666.*only root may write"):
        write_config(tmp_path, CriuOptions(), [users])


@given(st.lists(st.text(max_size=20), max_size=3))
def test_no_line_of_ours_becomes_two(tmp_path_factory: pytest.TempPathFactory, values: list[str]) -> None:
    directory = tmp_path_factory.mktemp("c")
    try:
        write_config(directory, CriuOptions(extra=tuple(line("external", f"mnt[x]:{value}") for value in values)), [])
    except Refused:
        return
    written = lines_of(directory / "kybernate-criu.conf")
    assert [text for text in written if text.startswith("external ")] == [
        f"external mnt[x]:{value}" for value in values
    ]
    assert len(written) == 7 + len(values)


def test_a_tenants_choice_is_dropped(tmp_path: Path) -> None:
    document: dict[str, Any] = {
        "annotations": {
            "io.kubernetes.cri.container-type": "container",
            "org.criu.config": "/scratch/evil.conf",
            "kybernate.io/criu-config": "/scratch/evil.conf",
        }
    }
    claim_config(document, tmp_path / "c.conf")
    assert document["annotations"]["org.criu.config"] == str(tmp_path / "c.conf")
    assert "evil" not in str(document)
    document["annotations"]["kybernate.io/criu-config"] = "/scratch/evil.conf"  # by whatever way
    assert users_file(Spec(document), Config()) == Path("/etc/criu/runc.conf")


def test_mounts_of_both_are_kept() -> None:
    ours = ["external mnt[/a]:/a", "skip-mnt /b"]
    assert without(ours, ["external mnt[/c]:/c", "skip-mnt /d"]) == ours


@given(st.lists(st.sampled_from(["tcp-close", "no-tcp-close", "timeout 3", "libdir /x"])))
def test_no_option_is_set_twice(theirs: list[str]) -> None:
    kept = without(CriuOptions().lines(), theirs)
    names = {text.split()[0].removeprefix("no-") for text in theirs}
    assert not names & {text.split()[0] for text in kept}


def test_the_annotation_names_our_file_and_keeps_the_users(tmp_path: Path) -> None:
    document: dict[str, Any] = {"annotations": {"org.criu.config": "/home/me/criu.conf"}}
    for _ in range(2):
        claim_config(document, tmp_path / "c.conf")
    assert document["annotations"] == {
        "org.criu.config": str(tmp_path / "c.conf"),
        "kybernate.io/criu-config": "/home/me/criu.conf",
    }
    assert users_file(Spec(document), Config()) == Path("/home/me/criu.conf")


def test_without_an_annotation_the_runtimes_own_file_counts(tmp_path: Path) -> None:
    document: dict[str, Any] = {}
    claim_config(document, tmp_path / "c.conf")
    assert users_file(Spec(document), Config()) == Path("/etc/criu/runc.conf")
    assert users_file(Spec(document), Config(), "crun") == Path("/etc/criu/crun.conf")


def test_an_empty_annotation_means_no_file(tmp_path: Path) -> None:
    document: dict[str, Any] = {"annotations": {"org.criu.config": ""}}
    claim_config(document, tmp_path / "c.conf")
    assert users_file(Spec(document), Config()) is None


@pytest.mark.parametrize(
    ("text", "version"),
    [("4.2", (4, 2)), ("4.1.1-2", (4, 1, 1)), ("v3.17", (3, 17)), ("6.18-fc", (6, 18)), ("x", ())],
)
def test_versions_are_numbers(text: str, version: tuple[int, ...]) -> None:
    assert parse_version(text) == version


def test_a_usable_criu_has_its_version() -> None:
    assert asyncio.run(criu_version(Answers(version=finished(stdout="Version: 4.1.1\nGitID: x\n")))) == "4.1.1"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"version": FileNotFoundError("criu: not found in PATH=/bin")}, "not found in PATH=/bin.*install CRIU"),
        ({"version": finished(1, stderr="broken\n")}, "--version ended with status 1: broken"),
        ({"version": ProgramTimedOut(["criu"], 30)}, "did not end within 30 s"),
    ],
)
def test_an_unusable_criu_is_named_with_its_own_words(answers: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        asyncio.run(criu_version(Answers(**answers)))


def test_the_lines_that_matter_are_its_errors(tmp_path: Path) -> None:
    (tmp_path / "dump.log").write_text(LOG)
    assert errors_of(tmp_path / "dump.log") == [
        "Error (criu/files-reg.c:1790): Can't lookup mount=91 for fd=2 path=/run/t/err",
        "Error (criu/cr-dump.c:2111): Dumping FAILED.",
    ]
    assert explain("dump failed", tmp_path / "dump.log").endswith(f"Dumping FAILED. (whole log: {tmp_path}/dump.log)")


def test_of_many_errors_the_last_ones_are_kept(tmp_path: Path) -> None:
    (tmp_path / "l").write_text("".join(f"(00.1) Error (a.c:{n}): x\n" for n in range(50)))
    assert errors_of(tmp_path / "l", most=2) == ["Error (a.c:48): x", "Error (a.c:49): x"]


def test_a_log_without_errors_ends_somewhere(tmp_path: Path) -> None:
    (tmp_path / "l").write_bytes(b"(00.1) a\n(00.2) b\n\n(00.3) c\n(00.4) \xff\n")
    assert errors_of(tmp_path / "l") == ["b", "c", "\ufffd"]


def test_a_log_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert explain("dump failed", tmp_path / "l") == f"dump failed (CRIU left no log at {tmp_path}/l)"
