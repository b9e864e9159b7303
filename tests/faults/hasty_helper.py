"""The CUDA helper with short deadlines of its own: `python -m tests.faults.hasty_helper`, with its arguments.

What a caller cannot set is seconds to minutes on a node. Here most of these deadlines are waited for.
"""

from __future__ import annotations

import sys

from kybernate_shim.cuda import helper
from kybernate_shim.cuda.arena import jobs, keeper, shared_worker

SHORTER = {
    (helper, "LOCK_GRACE_SECONDS"): 0.5,
    (keeper, "RELOCK_SECONDS"): 1.0,
    (shared_worker, "REACT_SECONDS"): jobs.UNDO_SECONDS + 1.0,  # a job that undoes something ends by then
    (shared_worker, "PING_SECONDS"): 1.0,
}


def main() -> int:
    for (module, name), seconds in SHORTER.items():
        assert getattr(module, name) > seconds, f"{module.__name__}.{name} is shorter already"
        setattr(module, name, seconds)
    return helper.main()


if __name__ == "__main__":
    sys.exit(main())
