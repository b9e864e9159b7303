"""What systemd passes to a service and wants to hear from it.

Without systemd, every function does nothing or returns nothing.

Source: sd_notify(3), sd_listen_fds(3), systemd.service(5).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

FIRST: Final = 3  # SD_LISTEN_FDS_START
VARIABLES: Final = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@dataclass(frozen=True)
class Notifier:
    """The socket of the service manager; "" where there is none.

    `watchdog` is how many seconds it waits for a sign of life, 0 for any time.
    """

    address: str = ""
    watchdog: float = 0.0

    @classmethod
    def of(cls, environment: Mapping[str, str], pid: int) -> Notifier:
        """Return what the environment of this process says."""
        microseconds = environment.get("WATCHDOG_USEC", "")
        ours = environment.get("WATCHDOG_PID", str(pid)) == str(pid)
        patience = int(microseconds) / 1e6 if microseconds.isdecimal() and ours else 0.0
        return cls(environment.get("NOTIFY_SOCKET", ""), patience)

    def send(self, **fields: str) -> None:
        """Send fields such as READY="1". The work continues where the manager does not receive them."""
        if not self.address.startswith(("/", "@")):
            return
        address = self.address.replace("@", "\0", 1) if self.address.startswith("@") else self.address
        message = "\n".join(f"{name}={value}" for name, value in fields.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(message.encode(), address)
        except OSError:
            pass


def passed_sockets(environment: Mapping[str, str], pid: int) -> dict[str, socket.socket]:
    """Return the listening sockets that systemd has opened for this process, by their names.

    The name is that of `FileDescriptorName=`; one without is named by its number.
    """
    number = environment.get("LISTEN_FDS", "")
    if environment.get("LISTEN_PID") != str(pid) or not number.isdecimal():
        return {}
    names: list[Any] = environment.get("LISTEN_FDNAMES", "").split(":")
    found = {}
    for index in range(int(number)):
        name = names[index] if index < len(names) and names[index] else str(index)
        os.set_inheritable(FIRST + index, False)
        found[name] = socket.socket(fileno=FIRST + index)
    return found


def forget(environment: MutableMapping[str, str]) -> None:
    """Remove the variables, so that programs that the agent starts do not take themselves for the service."""
    for name in VARIABLES:
        environment.pop(name, None)
