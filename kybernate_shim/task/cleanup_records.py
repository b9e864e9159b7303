"""What the bundle of a container records for a `delete` without this daemon: the work to undo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kybernate_shim.oci.bundle import CleanupRecord

if TYPE_CHECKING:
    from kybernate_shim.task.container import Container


class CleanupRecords:
    """The cleanup record of one container: which operation runs, and which processes may be locked."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._phase = "create"
        self._locked_pids: tuple[int, ...] = ()
        self._whole = True
        self._parking_root = ""

    def record_phase(self, phase: str) -> None:
        """Record which operation runs, "idle" for none."""
        self._phase = phase
        if phase == "park":
            self._parking_root = str(self._container.config.parking_root)
        self._write()

    def record_locked(self, pids: Sequence[int], *, whole: bool = True) -> None:
        """Record the processes that may be locked, and whether a part of their memory is only in files."""
        self._locked_pids, self._whole = tuple(pids), whole
        self._write()

    def _write(self) -> None:
        cli, cgroup = self._container.runtime.cli, self._container.cgroup
        self._container.bundle.write_cleanup_record(
            CleanupRecord(
                str(cli.binary),
                str(cli.root),
                cli.systemd_cgroup,
                phase=self._phase,
                cgroup=str(cgroup.tracking) if cgroup is not None else "",
                locked_pids=self._locked_pids,
                whole=self._whole,
                parking_root=self._parking_root,
            )
        )
