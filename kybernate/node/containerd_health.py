"""containerd as a user of Kybernate needs it: it runs, answers, and has loaded a handler that starts our shim.

`findings` is a pure function of what `containerd_facts.gather` has found, with one remedy a finding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from kybernate.node.containerd_facts import (
    ANSWER_SECONDS,
    CLOCK_SECONDS,
    CRI_CHECKPOINTS,
    CRI_RESTORES,
    HANDLER,
    ONE_PLUGIN,
    OTHERS,
    SETUP,
    SPLIT,
    SPLIT_CRI,
    TESTED,
    Answer,
    ConfigurationFile,
    ContainerdFacts,
    Shim,
    handlers,
    is_ours,
)
from kybernate.node.finding import HealthFinding, Verdict, compared
from kybernate.node.room import findings as room_findings
from kybernate_shim import __version__, bounded_json
from kybernate_shim.checkpoint.criu.config import parse_version

NO_DEPRECATIONS = "ContainerdHasNoDeprecationWarnings"  # a condition of CRI's, from containerd 2.0 on


def findings(facts: ContainerdFacts) -> Iterator[HealthFinding]:
    """Yield what is found of containerd, its configuration, the handlers and the shim."""
    if not facts.program:
        yield HealthFinding("containerd", "note", "not installed", "install containerd 1.7 or newer")
        return
    release = parse_version(facts.version)[:2]
    if not release:
        yield HealthFinding(
            "containerd", "bad", facts.version_words or "does not run", "install containerd 1.7 or newer"
        )
        return
    yield compared("containerd", f"{facts.version}: {_through_cri(release)}", facts.version, TESTED)
    yield _process(facts)
    yield from _socket(facts)
    yield from _configuration(facts, release)
    yield from _handlers(facts)
    yield from _cri(facts)
    yield from map(_shim, facts.shims)
    yield from room_findings(facts.rooms)


def _through_cri(version: tuple[int, ...]) -> str:
    """Say what containerd's CRI, and so the kubelet and `crictl`, can do with checkpoints."""
    if version < CRI_CHECKPOINTS:
        return "CRI has no checkpoints"
    if CRI_RESTORES[0] <= version <= CRI_RESTORES[1]:
        return "CRI writes checkpoints and restores them"
    return "CRI writes checkpoints, pods restore by annotation"


def _process(facts: ContainerdFacts) -> HealthFinding:
    subject, running = "containerd's process", facts.running
    if running is None:
        advice = "`systemctl start containerd` starts it, `journalctl -u containerd` shows why it ended"
        return HealthFinding(subject, "bad", "does not run", advice)
    if running.halted:
        found = f"process {running.pid} is stopped by a signal or a debugger"
        return HealthFinding(subject, "bad", found, f"`kill -CONT {running.pid}` continues it")
    return HealthFinding(subject, "ok", f"{running.pid}, {running.unit or 'no service of systemd'}")


def _socket(facts: ContainerdFacts) -> Iterator[HealthFinding]:
    subject = "containerd's socket"
    if facts.running is None or (facts.running.halted and facts.answer == "silent"):
        return  # the process is the reason
    problems: dict[Answer, tuple[Verdict, str, str]] = {
        "no socket": ("bad", "is missing", "restart containerd: it makes its socket when it starts"),
        "no permission": ("note", "this user may not connect", "run as root"),
        "nothing listens": ("bad", "no process listens", "`systemctl restart containerd`"),
        "silent": (
            "bad",
            f"no answer within {ANSWER_SECONDS:.0f} s",
            "`systemctl restart containerd`: containers keep running; `journalctl -u containerd` shows what it did",
        ),
        "refused": ("bad", facts.words, "`journalctl -u containerd` shows why"),
    }
    if facts.answer in problems:
        verdict, found, advice = problems[facts.answer]
        yield HealthFinding(subject, verdict, f"{facts.address}: {found}", advice)
    elif facts.mode & OTHERS:
        found = f"{facts.address} has mode {facts.mode:04o}: every user of the node is root through it"
        yield HealthFinding(subject, "bad", found, f"chmod 0660 {facts.address}")
    else:
        yield HealthFinding(subject, "ok", f"{facts.address} answers")


def _configuration(facts: ContainerdFacts, release: tuple[int, ...]) -> Iterator[HealthFinding]:
    subject = "containerd's configuration"
    broken = [one for one in facts.files if one.problem]
    for one in broken:
        advice = f"correct {one.path} before the next restart: containerd does not start with it"
        yield HealthFinding(subject, "bad", f"{one.path}: {one.problem}", advice)
    if broken:
        return
    if facts.dumped is None:
        advice = f"`{facts.program} config dump` shows what is wrong: containerd does not start with it"
        yield HealthFinding(subject, "bad", facts.dump_words or "cannot be read", advice)
        return
    strange = [one for one in facts.files if _foreign_plugin(one)]
    for one in strange:
        plugin = _foreign_plugin(one)
        found = f"{one.path} is of version {one.form}, and has a table of {plugin}, which containerd ignores there"
        yield HealthFinding(subject, "bad", found, f"remove that table; {SETUP}")
    main = facts.files[0] if facts.files else None
    form = f"version {main.form}" if main else "none, containerd's defaults"
    ours = [name for name, runtime in handlers(facts.dumped).items() if is_ours(runtime)]
    found = f"{form}; handlers of Kybernate: {', '.join(ours) or 'none'}"
    wrong = handlers(facts.dumped).get(HANDLER)
    if wrong is not None and not is_ours(wrong):
        runs = f"runtime_type {wrong.get('runtime_type', '')!r} and runtime_path {wrong.get('runtime_path', '')!r}"
        yield HealthFinding(subject, "bad", f"the handler {HANDLER} has {runs}: not Kybernate's shim", SETUP)
    elif not ours:
        advice = f"pods cannot name Kybernate; {SETUP}"
        yield HealthFinding(subject, "bad", found, advice)
    elif release >= (2, 0) and main is not None and main.form < SPLIT_CRI:
        advice = "run `containerd config migrate` before a drop-in file is added, or settings of CRI are lost"
        yield HealthFinding(subject, "note", found, advice)
    elif not strange:
        yield HealthFinding(subject, "ok", found)


def _foreign_plugin(one: ConfigurationFile) -> str:
    """Return CRI's table that a file has and that counts in files of another version only, "" for none."""
    foreign = SPLIT if one.form < SPLIT_CRI else ONE_PLUGIN
    return foreign if f"{foreign} handlers" in one.plugins else ""


def _handlers(facts: ContainerdFacts) -> Iterator[HealthFinding]:
    """Compare the handlers of the files with those that the process has loaded."""
    if facts.dumped is None or facts.running is None or facts.running.halted:
        return
    ours = [name for name, runtime in handlers(facts.dumped).items() if is_ours(runtime)]
    if not ours:
        return
    missing = [name for name in ours if facts.loaded is not None and name not in facts.loaded]
    newer = [str(one.path) for one in facts.files if one.changed > facts.running.since + CLOCK_SECONDS]
    restart = f"`systemctl restart {facts.running.unit or 'containerd'}`: containers keep running"
    if missing:
        yield HealthFinding("handlers", "bad", f"not loaded: {', '.join(missing)}", restart)
    elif facts.awaited or newer:
        what = ", ".join(newer) or "the configuration"
        yield HealthFinding("handlers", "note", f"{what} has changed since containerd started", restart)
    elif facts.loaded is not None:
        yield HealthFinding("handlers", "ok", f"loaded: {', '.join(ours)}")


def _cri(facts: ContainerdFacts) -> Iterator[HealthFinding]:
    for words in facts.cri:
        if words.startswith("NetworkReady"):
            yield HealthFinding("CRI", "note", words, "pods need a network plugin; `ctr run` works without")
        elif words.startswith(NO_DEPRECATIONS):
            advice = "nothing fails yet; `ctr deprecations list` shows what a later containerd will not have"
            yield HealthFinding("CRI", "note", _deprecations(words), advice)
        else:
            yield HealthFinding(
                "CRI", "bad", words, "`ctr plugins ls` shows CRI's state, `journalctl -u containerd` the reason"
            )


def _deprecations(words: str) -> str:
    """Return the sentences of containerd's warnings, which are an object of JSON; all of the text where it is none."""
    try:
        warnings = bounded_json.parse(words.removeprefix(f"{NO_DEPRECATIONS}: ").encode())
    except ValueError:
        return words
    return "; ".join(map(str, warnings.values())) if isinstance(warnings, dict) else words


def _shim(shim: Shim) -> HealthFinding:
    subject = f"shim of {shim.handler}"
    write = f"`{sys.executable} -Im kybernate_shim.launcher {Path(shim.wanted).parent}` writes it"
    if not shim.path:
        return HealthFinding(subject, "bad", f"{shim.wanted} is missing", write)
    if not shim.version:
        return HealthFinding(subject, "bad", f"{shim.path} does not run: {shim.words or 'it prints nothing'}", write)
    if shim.version != __version__:
        found = f"{shim.path} is of version {shim.version}, this command of version {__version__}"
        return HealthFinding(subject, "bad", found, write)
    return HealthFinding(subject, "ok", f"{shim.path}, version {shim.version}")
