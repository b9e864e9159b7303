"""The life cycle of a container's GPU state, as one table: which calls a state allows, and which state follows.

The container's life cycle has a separate table (see lifecycle.py), and both have to allow a call. What the driver says
of the processes is the truth; this is what the daemon is doing about it, and how it returns to it.

A suspended container stays so while its VRAM is parked.

"attached": the processes compute, as far as the daemon knows. "stuck": an operation could not bring all of them back.
While an operation runs, another call is refused immediately unless the table allows it; it does not wait. A process
that an exec starts in a suspended container computes; the next suspend includes it.
"""

from __future__ import annotations

from kybernate_shim.errors import Busy, Refused

ALWAYS = ("exec", "kill", "delete")  # they change nothing here: a suspended container can be inspected, and ended
BUSY = frozenset({"suspending", "parking", "resuming", "checkpointing", "restoring"})
STARTS = {
    "attached": {
        "suspend": "suspending", "resume": "resuming", "checkpoint": "checkpointing", "restore": "restoring",
        "pause": "attached", "unpause": "attached",
    },
    "suspended": {
        "suspend": "suspending", "park": "parking", "resume": "resuming", "checkpoint": "checkpointing",
        "pause": "suspended", "unpause": "suspended",
    },
    "stuck": {"resume": "resuming", "pause": "stuck", "unpause": "stuck"},
    "suspending": {}, "parking": {}, "resuming": {}, "checkpointing": {}, "restoring": {},
}  # fmt: skip
# The state after an operation, by its outcome; for other outcomes, the state before it.
ENDS = {
    "suspending": {"done": "suspended", "not back": "stuck"},
    "parking": {"done": "suspended"},
    "resuming": {"done": "attached", "nothing to do": "attached", "still away": "suspended", "not back": "stuck"},
    "checkpointing": {"still away": "suspended", "not back": "stuck"},
    "restoring": {"done": "attached"},
}
WORDS = {
    "suspending": "its VRAM is being offloaded",
    "parking": "its VRAM is being moved to the disk",
    "resuming": "its VRAM is being reloaded",
    "checkpointing": "a checkpoint of it is being written",
    "restoring": "it is being restored",
}


class GpuStates:
    """The GPU state of container `id`, which belongs to the daemon's one event loop."""

    def __init__(self, id: str) -> None:
        self.state = "attached"
        self._id = id
        self._before = "attached"

    @property
    def busy(self) -> bool:
        return self.state in BUSY

    def require(self, call: str) -> None:
        """Raise Busy while an operation runs that `call` cannot share the container with, or Refused."""
        if call in ALWAYS or call in STARTS[self.state]:
            return
        if self.busy:
            raise Busy(
                f"cannot {call} container {self._id} now: {WORDS[self.state]}; try again when that has ended, which"
                f" `kybernate status {self._id}` shows"
            )
        if call == "park":
            raise Refused(f"cannot park container {self._id}: only what is suspended can be parked")
        raise Refused(
            f"cannot {call} container {self._id}: some of its processes are not back on their GPUs; `kybernate resume"
            f" {self._id}` retries that"
        )

    def begin(self, call: str) -> None:
        """Enter the state of an operation until `end`. Raises as `require`."""
        self.require(call)
        self._before, self.state = self.state, STARTS[self.state][call]

    def end(self, outcome: str) -> None:
        """Enter the state to which the operation has led."""
        self.state = ENDS[self.state].get(outcome, self._before)
