"""A network for pods of `kybernate up` where the node has none: a bridge, known to containerd by a CNI configuration.

Names say whose it is, and what is written can be written again: the CNI configuration is named after the project, and
is the note of all that belongs to it. `remove` takes bridge and firewall away with it, also those of an `up` that a
power cut has ended.
Source: the CNI specification 1.0.0; CNI's plugins `bridge` and `host-local`; nft(8).
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Final

from kybernate.node.failure import Refused, Unavailable
from kybernate.up.pods import Pods

CONFIGURATIONS: Final = Path("/etc/cni/net.d")
ADDRESSES: Final = Path("/var/lib/cni/networks")  # those that host-local has given, by networks
READY_SECONDS: Final = 20.0  # until containerd has read a new configuration
NFT_SECONDS: Final = 20.0
LINK_EXISTS: Final = 17  # EEXIST of netlink
Say = Callable[[str, str], None]


def bridge_of(project: str) -> str:
    """Return the name of a project's bridge; the kernel takes 15 characters."""
    return f"kyb-{project}" if len(project) <= 11 else f"kyb-{sha256(project.encode()).hexdigest()[:11]}"


def name_of(project: str) -> str:
    """Return the name of a project's network, of its firewall's table, and of the file that describes it."""
    return f"kybernate-up-{project}"


def subnet_of(project: str) -> str:
    """Return the addresses of a project's pods, in 10.200.0.0/16."""
    return f"10.200.{sha256(project.encode()).digest()[0]}.0/24"


def configuration(project: str) -> str:
    """Return the CNI configuration of a project's network."""
    bridge = {
        "type": "bridge",
        "bridge": bridge_of(project),
        "isDefaultGateway": True,  # with its route: another one in `ipam` would be a second
        "ipMasq": True,
        "hairpinMode": False,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": subnet_of(project)}]]},
    }
    return json.dumps({"cniVersion": "1.0.0", "name": name_of(project), "plugins": [bridge]}, indent=2) + "\n"


def firewall(project: str) -> str:
    """Return the rules of a project's firewall: only the node itself, and so the proxy, may connect to its pods."""
    bridge, table = bridge_of(project), name_of(project)
    return f"""\
table inet {table}
delete table inet {table}
table inet {table} {{
    comment "pods of kybernate up, project {project}"
    chain forward {{
        type filter hook forward priority filter; policy accept;
        oifname "{bridge}" ct state established,related accept
        oifname "{bridge}" drop
    }}
}}
"""


def ensure(project: str, pods: Pods, say: Say) -> None:
    """Make a network for a project's pods, unless the node has one; one of its own is completed.

    Raises Refused and Unavailable.
    """
    path = CONFIGURATIONS / f"90-{name_of(project)}.conflist"
    if not path.exists():
        if pods.has_network():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(configuration(project))
        new.rename(path)
        say("", f"made the network {subnet_of(project)} on the bridge {bridge_of(project)}: {path}")
    _nft(firewall(project))
    end = time.monotonic() + READY_SECONDS
    while not pods.has_network():
        if time.monotonic() > end:
            raise Unavailable(
                f"containerd does not use {path}",
                state="models with a network of their own do not start",
                advice="CNI's plugins must be where containerd looks: apt-get install containernetworking-plugins",
            )
        time.sleep(0.1)


def remove(project: str, say: Say) -> None:
    """Remove a project's network, bridge and firewall, as far as they are there. Raises Refused."""
    path = CONFIGURATIONS / f"90-{name_of(project)}.conflist"
    if not path.exists():
        return
    _nft(f"table inet {name_of(project)}\ndelete table inet {name_of(project)}\n")
    from pyroute2 import IPRoute  # what it loads, only nodes without a network need

    with IPRoute() as routes:
        for index in routes.link_lookup(ifname=bridge_of(project)):
            routes.link("del", index=index)
    leases = ADDRESSES / name_of(project)
    for lease in leases.glob("*"):
        lease.unlink()
    if leases.is_dir():
        leases.rmdir()
    path.unlink()  # last: it is the note that there is something to remove
    say("", f"removed the network on the bridge {bridge_of(project)}")


def _nft(rules: str) -> None:
    try:
        done = subprocess.run(
            ["nft", "-f", "-"], input=rules, text=True, capture_output=True, timeout=NFT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"nft cannot be run: {error}", advice="apt-get install nftables") from error
    if done.returncode != 0:
        raise Refused(f"nft refuses the firewall: {done.stderr.strip()}", state="no pod was started")
