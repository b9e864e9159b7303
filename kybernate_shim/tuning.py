"""The switch for all that the shim does to its interpreter: `fork_server_tuning` in the node's file.

Off, the fork server is an interpreter like any other. On, it does the following. A figure is the proportional memory
(PSS) that one of 20 idle pods has more without the part: containerd 1.7, Python 3.13, medians of four rounds in which
each part was left out in turn. With all parts a pod has 4.0 MiB.

    fork_server/shared_pages.py   objects that live as long as the server are immortal             3.2 MiB
                                  gaps between them are filled, in pools and in the C heap         0.3 MiB
    imports.py, without           ssl, _hashlib, compressions, then also rich, seem not installed  0.45 MiB
    imports.py, postpone          protobuf's messages in Python are imported on use                not resolved

With Python 3.14, and containerd 2.1, each in addition to those before it, of one of 20 pods and of a single one:

    imports.py, both              what libraries import for what no daemon does                    0.2, 2.3 MiB
    fork_server/shared_pages.py   constants are immortal before they are loaded                    0.4, 0.4 MiB
                                  small gaps are filled in the C heap as well                      0.2, 0.2 MiB

Neither kind of gap alone is worth its filling: 0.2 MiB in pools, 0.1 MiB in the heap. All modules together that were
once imported on use saved 0.2 MiB; protobuf's are left, which bring a dozen others. What the parts save of a start's
time could not be distinguished from the noise of the machine that measured it.
"""

from __future__ import annotations

_on = True


def is_on() -> bool:
    """Return whether this process may change its interpreter."""
    return _on


def switch_off() -> None:
    """Leave the interpreter as it is from now on, in this process and in those that it forks."""
    global _on
    _on = False
