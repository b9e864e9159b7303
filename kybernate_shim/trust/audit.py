"""The audit log: one line of JSON for each checkpoint, restore, suspend, park, resume and import, allowed or not.

A line records who configured the container, who made the call, which image was concerned, and the result. Nothing that
a pod's author chooses can end a line or begin one: every value is a JSON string in ASCII.

The file is opened for each line, so that it can be renamed at any time (logrotate). A line that cannot be written stops
no operation: otherwise a full log disk, which pods can cause, would prevent all restores on the node. The loss is
logged as an error by the daemon (`audit.lost`), whose log has the line itself as the event `audit.recorded`.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from kybernate_shim.errors import Cancelled, Damaged, Missing, NoRoom, Refused
from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.trust.caller import CALLER, Caller
from kybernate_shim.trust.requester import NODE, Requester

if TYPE_CHECKING:
    from kybernate_shim.config import Config
    from kybernate_shim.logs import Log

Verb = Literal[
    "checkpoint", "release", "restore", "suspend", "park", "resume", "import",
    # of the node agent alone
    "swap", "wake", "sleep", "copy", "evict", "cancel", "pin", "label", "verify", "delete", "export", "send",
]  # fmt: skip
Decision = Literal["allowed", "refused", "failed", "cancelled", "done"]

OF_REQUESTER: Final = ("kind", "namespace", "pod", "uid", "container")
LONGEST: Final = 4096  # characters of one value; a pod's annotation may have 256 KiB
NOT_SET: Final = "4294967295"  # the kernel's value for a process without a login
_REFUSALS: Final = (Refused, Missing, Damaged, NoRoom)


@dataclass(frozen=True)
class ImageRef:
    """A checkpoint image, as far as it is known: `path` is what was requested where no image was found."""

    path: str = ""
    id: str = ""
    manifest_digest: str = ""
    source_namespace: str = ""
    source_pod: str = ""


@dataclass(frozen=True)
class Audit:
    """One line. `requester` is the author of the container `task`; `caller` made the call, None where none did."""

    verb: Verb
    decision: Decision
    requester: Requester = NODE
    task: str = ""
    containerd_namespace: str = ""
    image: ImageRef = field(default_factory=ImageRef)
    reason: str = ""
    seconds: float = 0.0
    caller: Caller | None = field(default_factory=CALLER.get)
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))

    def document(self) -> dict[str, Any]:
        """Return the line's fields, in their order."""
        return {
            "time": self.time,
            "verb": self.verb,
            "decision": self.decision,
            "reason": self.reason[:LONGEST],
            "requester": _shortened({name: getattr(self.requester, name) for name in OF_REQUESTER}),
            "caller": _caller(self.caller),
            "task": self.task,
            "containerd_namespace": self.containerd_namespace,
            "image": _shortened(asdict(self.image)),
            "seconds": round(self.seconds, 3),
        }


def decision_of(error: BaseException) -> Decision:
    """Return what an operation's error means: `refused` where nothing was begun for a reason, `cancelled`, `failed`."""
    if isinstance(error, Cancelled):
        return "cancelled"
    return "refused" if isinstance(error, _REFUSALS) else "failed"


def write(record: Audit, config: Config, log: Log) -> None:
    """Append the line to the node's audit log, and log it as the event `audit.recorded`. Never raises."""
    document = record.document()
    log.info("audit.recorded", **{name if name != "time" else "audit_time": value for name, value in document.items()})
    if config.audit_log is None:
        return
    try:
        append(config.audit_log, document)
    except OSError as error:
        log.error("audit.lost", file=str(config.audit_log), error=str(error))


def append(path: Path, document: dict[str, Any]) -> None:
    """Write one line with one write(2); the directory is made where it is missing. Raises OSError."""
    line = json.dumps(document, separators=(",", ":")).replace("\x7f", "\\u007f").encode() + b"\n"
    make_directory(path.parent)
    # Never blocks on a FIFO, never follows a link in place of the file.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        if status.st_size and os.pread(fd, 1, status.st_size - 1) != b"\n":
            line = b"\n" + line  # an earlier line was torn by a full disk
        if (written := os.write(fd, line)) < len(line):
            raise OSError(f"{path}: only {written} of {len(line)} bytes could be written; is the disk full?")
    finally:
        os.close(fd)


def _caller(caller: Caller | None) -> dict[str, Any]:
    """Return the caller's fields. `login_uid` is the user for whom the process was started, noted by pam_loginuid."""
    if caller is None:
        return {"by": "", "method": "", "uid": None, "pid": None, "login_uid": None, "name": ""}
    return {
        "by": caller.by,
        "method": caller.method,
        "uid": caller.uid,
        "pid": caller.pid,
        "login_uid": _login_uid(caller.pid),
        "name": caller.name[:LONGEST],
    }


def _login_uid(pid: int | None) -> int | None:
    try:
        text = Path(f"/proc/{pid}/loginuid").read_text().strip() if pid else NOT_SET
    except OSError:
        return None  # it has ended, or the kernel keeps none
    return int(text) if text.isdecimal() and text != NOT_SET else None


def _shortened(fields: dict[str, str]) -> dict[str, str]:
    return {name: value[:LONGEST] for name, value in fields.items()}
