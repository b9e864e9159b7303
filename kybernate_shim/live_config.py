"""The node's file of settings as it is now, for processes that outlive a change of it.

Looked at when a setting is used, and never in between: a stat, and a reading only where the file is another one, or has
changed. A file that cannot be used changes nothing: the settings that were read last stay, and that is said once.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kybernate_shim.config import DEFAULT_PATH, Config, ConfigInvalid

# A file that was changed so shortly before it was read may change again without another time: the kernel's clock for
# files ticks at most every 10 ms.
YOUNG_NS = 50_000_000

Stamp = tuple[int, int, int, int, int]


class LiveConfig:
    """One process's view of the file. `problem` says why the file is not in use, "" where it is."""

    def __init__(self, log: Any, path: Path = DEFAULT_PATH) -> None:
        self._log = log
        self._path = path
        self._stamp: Stamp | None = None
        self._known = False  # whether `_stamp` is what `_config` was read from
        self._config = Config()
        self.problem = ""

    def read(self) -> Config:
        """Return the settings of the file, or those that it had when it could be used; before that, the defaults."""
        stamp = self._look()
        if not self._known or stamp != self._stamp:
            self._known, self._stamp = stamp is None or time.time_ns() - stamp[-1] > YOUNG_NS, stamp
            self._load()
        return self._config

    def _look(self) -> Stamp | None:
        try:
            found = self._path.stat()
        except OSError:
            return None  # missing; reading it reports any other problem
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _load(self) -> None:
        try:
            self._config = Config.load(self._path)
        except ConfigInvalid as error:
            if str(error) != self.problem:
                self._log.error("config.rejected", error=str(error), state="the previous settings stay in use")
            self.problem = str(error)
        else:
            if self.problem:
                self._log.info("config.accepted")
            self.problem = ""
