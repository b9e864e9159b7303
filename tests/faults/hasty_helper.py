"""The CUDA helper with short deadlines of its own: `python -m tests.faults.hasty_helper`, with its arguments.

What a caller cannot set is seconds to minutes on a node. Here most of these deadlines are waited for.
"""

from __future__ import annotations

import sys

from kybernate_shim.cuda_helper import driver_lock, helper, library_calls, node_arena, service, shared_worker
from kybernate_shim.cuda_worker import deadline

SHORTER = {
    (service, "LOCK_GRACE_SECONDS"): 0.5,
    (driver_lock, "RELOCK_SECONDS"): 1.0,
    (library_calls, "UNDO_SECONDS"): 1.0,
    (node_arena, "DROP_SECONDS"): 1.0,
    (shared_worker, "REACT_SECONDS"): deadline.UNDO_SECONDS + 1.0,  # a job that undoes something ends by then
    (shared_worker, "PING_SECONDS"): 1.0,
}


def main() -> int:
    for (module, name), seconds in SHORTER.items():
        assert getattr(module, name) > seconds, f"{module.__name__}.{name} is shorter already"
        setattr(module, name, seconds)
    return helper.main()


if __name__ == "__main__":
    sys.exit(main())
