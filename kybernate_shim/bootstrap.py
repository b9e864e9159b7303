"""What `start` answers: where the pod's daemon listens, and by which version of the protocol containerd may call it.

With version 3, containerd 2 connects to that address for each further container of the pod. With version 2, it executes
our program twice for each of them, as containerd 1.7 always does, which in turn accepts no version 3. Until 2.3, no
release says what it is when it calls (MAX_SHIM_VERSION is 2 in all of them), so its program is asked, once.
Source: containerd, core/runtime/v2/shim.go and shim_manager.go; runtime/v2/shim.go of 1.7.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from kybernate_shim.known_versions import KNOWN, keep_version, known_version, record_of

EVERY, GROUPED = 2, 3  # versions of the protocol: that of every containerd, and that of 2.0 and newer
FIRST_GROUPED: Final = 2  # major release
ASK_SECONDS: Final = 2.0


def answer(path: Path, version: int) -> str:
    """Return what `start` prints: the bootstrap parameters, as JSON, in which form every containerd takes them."""
    return json.dumps({"version": version, "address": f"unix://{path}", "protocol": "ttrpc"})


def protocol_of(containerd: int, binary: str, known: Path = KNOWN) -> int:
    """Return the newest version of the protocol that containerd accepts; EVERY where its program does not say.

    `containerd` is the pid of our parent. `binary` is the file that containerd has named as its own.
    """
    program = _program_of(containerd, binary)
    try:
        record = record_of("containerd", program, known)
        release = known_version(record)
        if release is None:
            release = release_in(_said_by(program))
            keep_version(record, release)
    except OSError:
        return EVERY
    return accepted_by(release)


def release_in(words: str) -> str:
    """Return the release in what `containerd --version` prints, "" in anything else."""
    fields = words.split()
    return fields[2].removeprefix("v") if len(fields) > 2 and fields[0] == "containerd" else ""


def accepted_by(release: str) -> int:
    """Return the newest version of the protocol that this release of containerd accepts."""
    major = release.partition(".")[0]
    return GROUPED if major.isdecimal() and int(major) >= FIRST_GROUPED else EVERY


def _program_of(containerd: int, binary: str) -> str:
    """Return the program to ask: the one that runs, since an upgrade may have replaced its file.

    Where our parent is another program, as behind a wrapper, it is the file.
    """
    running = Path(f"/proc/{containerd}/exe")
    try:
        return str(running) if str(running.readlink()).removesuffix(" (deleted)") == binary else binary
    except OSError:
        return binary


def _said_by(program: str) -> str:
    """Return what it prints as its version. Raises OSError, also where it fails or takes too long."""
    import subprocess  # one `start` of a boot asks

    argv = ["containerd", "--version"]  # by whose first word a program that is several in one knows what it is
    try:
        done = subprocess.run(
            argv, executable=program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=ASK_SECONDS, check=True,
        )  # fmt: skip
    except subprocess.SubprocessError as error:
        raise OSError(f"{program} does not say its version: {error}") from error
    return done.stdout.decode(errors="replace")
