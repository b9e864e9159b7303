"""HAProxy's runtime API: a command on its socket, and an answer until the end of the connection."""

from __future__ import annotations

import asyncio
import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SECONDS: Final = 5.0
MOST_BYTES: Final = 16 << 20


@dataclass(frozen=True)
class Traffic:
    """What a backend has in flight, with what waits in its queue; how many it has had; how many its server has."""

    in_flight: int
    total: int
    running: int = 0


class RuntimeApi:
    """Speaks to the process that listens on `socket`. Raises OSError where none does."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def ask(self, command: str) -> str:
        """Return the answer to a command."""
        try:
            async with asyncio.timeout(SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._socket, limit=MOST_BYTES)
                try:
                    writer.write(command.encode() + b"\n")
                    return (await reader.read()).decode("utf-8", "replace")
                finally:
                    writer.close()
        except TimeoutError as error:
            raise OSError(f"HAProxy did not answer `{command}` within {SECONDS:.0f} s") from error

    async def set_map(self, map: Path, key: str, value: str) -> None:
        """Have a key of a map mean this from now on; it may be new. Raises OSError where HAProxy refuses."""
        answer = (await self.ask(f"set map {map} {key} {value}")).strip()
        if "not found" in answer:
            answer = (await self.ask(f"add map {map} {key} {value}")).strip()
        if answer:
            raise OSError(f"HAProxy refused to change {key}: {answer}")

    async def keep_in_map(self, map: Path, keys: set[str]) -> None:
        """Remove all other keys."""
        for line in (await self.ask(f"show map {map}")).split("\n"):
            words = line.split()
            if len(words) == 3 and words[1] not in keys:
                await self.ask(f"del map {map} {words[1]}")

    async def pid(self) -> int:
        """Return the process that answers."""
        for line in (await self.ask("show info")).split("\n"):
            name, _, value = line.partition(": ")
            if name == "Pid":
                return int(value)
        raise OSError("HAProxy says no process id")

    async def traffic(self) -> dict[str, Traffic]:
        """Return what each backend has, by its name."""
        rows = list(csv.DictReader((await self.ask("show stat -1 6 -1")).lstrip("# ").split("\n")))
        running = {row["pxname"]: int(row["scur"] or 0) for row in rows if row.get("svname") == "model"}
        return {
            row["pxname"]: Traffic(
                int(row["scur"] or 0) + int(row["qcur"] or 0), int(row["stot"] or 0), running.get(row["pxname"], 0)
            )
            for row in rows
            if row.get("svname") == "BACKEND"
        }

    async def set_limit(self, backend: str, most: int) -> None:
        """Let a backend's server have so many requests at one time, 1 or more. Raises OSError where HAProxy refuses."""
        if answer := (await self.ask(f"set maxconn server {backend}/model {most}")).strip():
            raise OSError(f"HAProxy refused the limit of {backend}: {answer}")
