"""What doctor makes of the facts about containerd: each thing that is broken is named, with one remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kybernate.node import containerd_facts
from kybernate.node import containerd_health as health
from kybernate.node.containerd_facts import ONE_PLUGIN, SHIM, SPLIT, ConfigurationFile, ContainerdFacts, Shim
from kybernate.node.containerd_process import ContainerdProcess
from kybernate.node.room import Room
from kybernate_shim import __version__

MAIN = Path("/etc/containerd/config.toml")
PLACE = f"/usr/local/bin/{SHIM}"
OURS = {"runtime_type": "io.containerd.runc.v2", "runtime_path": PLACE}
RUNC = {"runtime_type": "io.containerd.runc.v2", "runtime_path": ""}
GIB = 1 << 30


def dump(plugin: str = SPLIT, **runtimes: Any) -> dict[str, Any]:
    return {"version": 3, "plugins": {plugin: {"containerd": {"runtimes": runtimes}}}}


RUNNING = ContainerdProcess(100, 1000.0, "/usr/bin/containerd", MAIN, "containerd.service", "/usr/local/bin:/usr/bin")
GOOD = ContainerdFacts(
    program="/usr/bin/containerd",
    version="2.1.4",
    running=RUNNING,
    files=(ConfigurationFile(MAIN, 900.0, 3, (f"{SPLIT} handlers",)),),
    dumped=dump(kybernate=OURS, runc=RUNC),
    loaded=("kybernate", "runc"),
    shims=(Shim("kybernate", PLACE, PLACE, __version__),),
    rooms=(Room("containerd's root", Path("/var/lib/containerd"), 100 * GIB, 50 * GIB, 1000),),
)


def lines(facts: ContainerdFacts) -> dict[str, tuple[str, str, str]]:
    return {one.subject: (one.verdict, one.found, one.advice) for one in health.findings(facts)}


def main(**fields: Any) -> tuple[ConfigurationFile, ...]:
    return (replace(GOOD.files[0], **fields),)


def test_containerd_on_which_all_is_well_has_no_advice() -> None:
    assert {subject: line for subject, line in lines(GOOD).items() if line[0] != "ok" or line[2]} == {}
    assert {"containerd", "containerd's process", "containerd's socket", "handlers"} <= lines(GOOD).keys()


@pytest.mark.parametrize(
    ("version", "verdict", "words"),
    [
        ("1.6.38~ds1", "bad", "CRI has no checkpoints"),
        ("1.7.24", "ok", "CRI has no checkpoints"),
        ("2.0.5", "ok", "pods restore by annotation"),
        ("2.1.9+ds1", "ok", "CRI writes checkpoints and restores them"),
        ("v2.4.2", "ok", "pods restore by annotation"),
        ("v2.5.0", "note", "pods restore by annotation"),
    ],
)
def test_version_says_what_cri_can_do(version: str, verdict: str, words: str) -> None:
    found = lines(replace(GOOD, version=version))["containerd"]
    assert (found[0], found[1].partition(": ")[0]) == (verdict, version)
    assert words in found[1]
    assert bool(found[2]) == (verdict != "ok")


BROKEN: dict[str, tuple[ContainerdFacts, str, str, str, str]] = {
    "none installed": (ContainerdFacts(), "containerd", "note", "not installed", "install"),
    "program that does not run": (replace(GOOD, version="", version_words="no"), "containerd", "bad", "no", "install"),
    "stopped": (replace(GOOD, running=None), "containerd's process", "bad", "does not run", "systemctl start"),
    "halted": (
        replace(GOOD, running=replace(RUNNING, halted=True), answer="silent"),
        "containerd's process", "bad", "is stopped by a signal", "kill -CONT 100",
    ),
    "hung": (replace(GOOD, answer="silent"), "containerd's socket", "bad", "no answer within 5 s", "restart"),
    "no socket": (replace(GOOD, answer="no socket"), "containerd's socket", "bad", "is missing", "restart"),
    "not our user": (replace(GOOD, answer="no permission"), "containerd's socket", "note", "may not", "run as root"),
    "open socket": (replace(GOOD, mode=0o666), "containerd's socket", "bad", "mode 0666", "chmod 0660"),
    "syntax error": (
        replace(GOOD, files=main(problem="Invalid value (at line 3, column 5)")),
        "containerd's configuration", "bad", f"{MAIN}: Invalid value (at line 3", "before the next restart",
    ),
    "no dump": (
        replace(GOOD, dumped=None, dump_words="toml: table x already exists"),
        "containerd's configuration", "bad", "already exists", "config dump",
    ),
    "no handler": (
        replace(GOOD, dumped=dump(runc=RUNC)),
        "containerd's configuration", "bad", "handlers of Kybernate: none", "kybernate setup containerd",
    ),
    "wrong type": (
        replace(GOOD, dumped=dump(kybernate={"runtime_type": "io.containerd.kybernat.v1"})),
        "containerd's configuration", "bad", "'io.containerd.kybernat.v1'", "kybernate setup containerd",
    ),
    "table of 2.x in a file of 1.7": (
        replace(GOOD, version="1.7.24", files=main(form=2), dumped=dump(ONE_PLUGIN, kybernate=OURS)),
        "containerd's configuration", "bad", f"is of version 2, and has a table of {SPLIT}", "remove that table",
    ),
    "to be migrated": (
        replace(GOOD, files=main(form=2, plugins=())),
        "containerd's configuration", "note", "version 2; ", "config migrate",
    ),
    "handler that is not loaded": (
        replace(GOOD, loaded=("runc",)), "handlers", "bad", "not loaded: kybernate", "systemctl restart",
    ),
    "pending restart": (
        replace(GOOD, files=main(changed=1003.0)), "handlers", "note", f"{MAIN} has changed", "systemctl restart",
    ),
    "setup that waits for a restart": (replace(GOOD, awaited=True), "handlers", "note", "has changed", "restart"),
    "CRI that is not loaded": (
        replace(GOOD, loaded=None, cri=("does not answer: unknown service",)), "CRI", "bad", "unknown", "plugins ls",
    ),
    "no network": (replace(GOOD, cri=("NetworkReady: no network config",)), "CRI", "note", "no network", "plugin"),
    "deprecated cgroup v1": (
        replace(GOOD, cri=('ContainerdHasNoDeprecationWarnings: {"io.containerd.deprecation/v1": "Use cgroup v2."}',)),
        "CRI", "note", "Use cgroup v2.", "deprecations list",
    ),
    "deprecation in another form": (
        replace(GOOD, cri=("ContainerdHasNoDeprecationWarnings: cgroup v1",)), "CRI", "note", "cgroup v1", "fails yet",
    ),
    "no shim": (
        replace(GOOD, shims=(Shim("kybernate", PLACE),)),
        "shim of kybernate", "bad", "is missing", "kybernate_shim.launcher /usr/local/bin",
    ),
    "shim that does not run": (
        replace(GOOD, shims=(Shim("kybernate", PLACE, PLACE, "", "no such file"),)),
        "shim of kybernate", "bad", "does not run: no such file", "launcher",
    ),
    "shim of another release": (
        replace(GOOD, shims=(Shim("kybernate", PLACE, PLACE, "0.0.1"),)),
        "shim of kybernate", "bad", "version 0.0.1", "launcher",
    ),
    "full": (
        replace(GOOD, rooms=(Room("containerd's root", Path("/r"), 100 * GIB, 1 << 20, 5),)),
        "containerd's root", "bad", "/r is full: 1 MiB free", "make room",
    ),
    "no inodes": (
        replace(GOOD, rooms=(Room("containerd's root", Path("/r"), GIB, GIB, 0),)),
        "containerd's root", "bad", "no free inodes", "remove",
    ),
    "read-only": (
        replace(GOOD, rooms=(Room("containerd's state", Path("/r"), GIB, GIB, None, readonly=True),)),
        "containerd's state", "bad", "read-only", "remount,rw",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named_with_a_remedy(case: str) -> None:
    facts, subject, verdict, words, remedy = BROKEN[case]
    found = lines(facts)[subject]
    assert found[0] == verdict
    assert words in found[1]
    assert remedy in found[2]
    assert "\n" not in found[2]


def test_shim_is_the_first_in_the_path_of_containerd_or_next_to_it(tmp_path: Path) -> None:
    for name in ("first", "second", "own"):
        (tmp_path / name).mkdir()
    named = {"plugins": {SPLIT: {"containerd": {"runtimes": {"k": {"runtime_type": containerd_facts.OUR_TYPE}}}}}}
    path = f"{tmp_path}/first:{tmp_path}/second"
    process = replace(RUNNING, path=path)
    program = str(tmp_path / "own/containerd")
    (missing,) = containerd_facts._shims(named, process, program)
    assert (missing.path, missing.wanted) == ("", PLACE)
    for name in ("own", "second"):
        shim = tmp_path / name / SHIM
        shim.write_text("#!/bin/sh\necho x:; echo '  Version: 9.9'\n")
        shim.chmod(0o755)
        (found,) = containerd_facts._shims(named, process, program)
        assert (found.path, found.version) == (str(shim), "9.9")


def test_file_that_is_no_toml_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('version = 3\nimports = ["conf.d/*.toml"]\n')
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d/a.toml").write_text("[a]\n[a]\n")
    first, second = containerd_facts._files(tmp_path / "config.toml")
    assert (first.form, first.problem) == (3, "")
    assert "at line 2" in second.problem
