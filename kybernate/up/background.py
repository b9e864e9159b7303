"""`kybernate up` in the background: a service of systemd, which a boot starts again, or elsewhere a process."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from kybernate.node.failure import Invalid, Unavailable
from kybernate.up.control import LOGS, answers, running_process
from kybernate.up.models_file import load

SYSTEMD: Final = Path("/run/systemd/system")  # is there where systemd is the service manager
UNITS: Final = Path("/etc/systemd/system")
START_SECONDS: Final = 90.0  # also on a machine with much else to do
STOP_SECONDS: Final = 30.0
UNIT: Final = """\
# Written by `kybernate up -d`, removed by `kybernate down`.
[Unit]
Description=Models of {file}
After=containerd.service kybernate-agent.service network-online.target
Wants=kybernate-agent.service network-online.target

[Service]
ExecStart={command}
Restart=always
RestartSec=2
KillMode=process

[Install]
WantedBy=multi-user.target
"""


def start(file: Path, project: str, agent: str, *, watch: bool) -> tuple[int, str]:
    """Start `kybernate up` of a file; return its process and where its log is, once its proxy answers.

    Raises Invalid and Unavailable.
    """
    command = [sys.executable, "-c", "from kybernate.cli import main; main()", "up", str(file.resolve())]
    command += ["--agent", agent] * bool(agent) + ["--watch"] * watch
    log = LOGS / project / "up.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    unit, child = unit_of(project), None
    if SYSTEMD.exists():
        _check_without_shell(file)
        unit.write_text(UNIT.format(file=file.resolve(), command=shlex.join(command).replace("%", "%%")))
        _systemctl("daemon-reload")
        _systemctl("enable", "--now", unit.name)
        where = f"journalctl -u {unit.name}"
    else:
        with log.open("ab") as output:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/"
            )
        where = str(log)
    end = time.monotonic() + START_SECONDS
    while not ((process := running_process(project)) and answers(project, end - time.monotonic())):
        if child is not None and (status := child.poll()) is not None:
            raise Unavailable(
                f"the process that keeps the models ended with status {status}", advice=f"look at {where}"
            )
        if time.monotonic() > end:
            raise Unavailable(
                f"no process keeps the models and takes requests after {START_SECONDS:.0f} s", advice=f"look at {where}"
            )
        time.sleep(0.05)
    return process, where


def _check_without_shell(file: Path) -> None:
    """Check that a file can be used by a service, which has none of the variables of the caller. Raises Invalid."""
    try:
        load(file, {})
    except Invalid as failure:
        raise Invalid(
            f"{failure}; a service of systemd has none of this shell's variables",
            state="no service was started",
            advice="name a file with lines NAME=VALUE in `env_file`, or leave out -d",
        ) from failure


def end(project: str) -> None:
    """End the process that keeps a project, and its service where it has one. Raises Unavailable."""
    unit = unit_of(project)
    if unit.exists():
        if SYSTEMD.exists():
            _systemctl("disable", "--now", unit.name)
        unit.unlink()
        if SYSTEMD.exists():
            _systemctl("daemon-reload")
    if process := running_process(project):
        os.kill(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while running_process(project) == process and time.monotonic() < deadline:
            time.sleep(0.05)


def unit_of(project: str) -> Path:
    """Return the file of a project's service."""
    return UNITS / f"kybernate-up-{project}.service"


def _systemctl(*words: str) -> None:
    done = subprocess.run(["systemctl", *words], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"systemctl {' '.join(words)}: {done.stderr.strip()}")
