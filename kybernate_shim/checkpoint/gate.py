"""Restored processes are held back, before their first instruction, until their privileges in /proc are looked at.

CRIU executes a script of ours (`script`) when it has restored everything and still holds every thread in a
ptrace stop: neither a signal nor a timer of the image wakes them. The script asks this daemon and waits. A refusal, an
error or the daemon's end kills the processes, whereupon CRIU and the OCI runtime fail.
Sources: CRIU's cr-restore.c (restore_root_task) and action-scripts.c of versions 4.1 and 4.2, which agree.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.arriving import Awaited
from kybernate_shim.checkpoint.cleanup import named, plain_path
from kybernate_shim.checkpoint.privileges import PrivilegesExceeded
from kybernate_shim.checkpoint.script import PASS, REFUSE, asked
from kybernate_shim.checkpoint.settled import Settled
from kybernate_shim.errors import Failed, HeldFailed
from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.linux.cgroup.hierarchies import UNIFIED, directories, hierarchy_mounts
from kybernate_shim.linux.credentials import of_process, process_tree
from kybernate_shim.linux.descriptors import outside
from kybernate_shim.linux.mount.mountinfo import MountPoint, read_cgroup_mounts
from kybernate_shim.linux.process import is_exiting, oom_score_adj, set_oom_score_adj
from kybernate_shim.linux.threads import as_long_as_wanted, to_the_end
from kybernate_shim.oci.runtime import Runtime, RuntimeTimedOut
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.credentials import PrivilegeAllowance, excess

# Of version 1: a fork may fail by the limits of the first two, and the last one lists what is killed together.
LEFT: Final[tuple[str, ...]] = ("pids", "memory", "freezer")


def must_hold(allowance: PrivilegeAllowance | None, awaited: Awaited | None, settled: Settled | None) -> bool:
    """Return whether restored processes must be held before they run."""
    return allowance is not None or awaited is not None or (settled is not None and settled.must_be_held)


@dataclass
class Gate:
    """What one restore's script asks. `refusals` are the sentences of an excess, or the error of a failed look.

    `take_out` moves CRIU out of the container's cgroup, `look` returns the excess of init and all below it, and `kill`
    ends everything in the container's cgroup. `settle` puts right what CRIU did not bring back as it was. They are also
    held until what is `awaited` is there; `failure` says why one of the two cannot be.
    """

    take_out: Callable[[int], None]
    look: Callable[[int], list[str]]
    kill: Callable[[], None]
    settle: Callable[[int], None] = lambda init: None
    passed: bool = False
    refusals: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    awaited: Awaited | None = None
    failure: Failed | None = None
    _moved: asyncio.Future[None] | None = None

    def known_to(self, runtime: Runtime) -> Runtime:
        """Return the runtime with what the script needs, and without a deadline: `guarded` has it."""
        return replace(
            runtime, env={**runtime.env, **self.environment}, deadlines=replace(runtime.deadlines, restore=0)
        )

    async def guarded(self, restore: Awaitable[None], seconds: float) -> None:
        """Wait so many seconds for `restore`, 0 for any; then, or if cancelled, kill the processes and end it.

        In this order: a CRIU that is killed detaches from processes that it holds, and they would run. Raises
        RuntimeTimedOut.
        """
        work = asyncio.ensure_future(restore)
        try:
            async with asyncio.timeout(seconds or None):
                await asyncio.shield(work)
        except (asyncio.CancelledError, TimeoutError) as error:
            self._give_up()
            try:
                await to_the_end(self.kill)
            finally:
                work.cancel()
                await asyncio.wait({work})
            if isinstance(error, TimeoutError):
                raise RuntimeTimedOut("restore", f"it did not end within {seconds:g} s") from error
            raise

    async def answer(self, question: str) -> bytes:
        """Return the answer to a line of the script's, b"" where it waits for none; after an excess, nothing is left.

        A refusal without an excess is left to the script, which kills init.
        """
        try:
            action, criu, init = question.split()
            if action == "pre-restore":
                self._moved = asyncio.ensure_future(asyncio.to_thread(self.take_out, int(criu)))
                return b""
            if self._moved is None:
                raise LookupError("CRIU was not taken out of the container's cgroup")
            await self._moved
            if action == "post-restore":
                return PASS
            try:
                await as_long_as_wanted(partial(self.settle, int(init)))
                self.refusals = await as_long_as_wanted(partial(self.look, int(init)))
                if self.awaited is not None and not self.refusals:
                    await self.awaited.wait()
                self.passed = not self.refusals
            finally:
                if not self.passed:
                    await asyncio.to_thread(end_held, int(init), int(criu))
        except HeldFailed as error:
            self.failure = error
        except Exception as error:  # noqa: BLE001  # whatever it is, the processes must not run
            reason = f"the restored processes could not be examined: {error}"
            self.refusals, self.passed = [*self.refusals, reason], False
        return PASS if self.passed else REFUSE

    def _give_up(self) -> None:
        if self.awaited is not None:
            self.awaited.stop()

    def require_passed(self) -> None:
        """Raise PrivilegesExceeded for what was refused, or where CRIU has not executed the script; or the failure."""
        if self.passed:
            return
        if self.failure is not None:
            raise self.failure
        refusals = self.refusals or ["CRIU did not stop for their comparison"]
        raise PrivilegesExceeded(refusals, "The restored processes were killed before they ran")


def _gate(
    spec: Spec, allowance: PrivilegeAllowance | None, awaited: Awaited | None, settle: Callable[[int], None]
) -> Gate:
    """Return the gate of one restore. CRIU mounts separate cgroup hierarchies, so cgroups are looked up before.

    Raises PrivilegesExceeded.
    """
    if not spec.cgroups_path:
        raise PrivilegesExceeded(["its configuration names no cgroup to keep them in"], "Nothing was restored")
    mounts = {controller: group[0] for controller, group in hierarchy_mounts(read_cgroup_mounts()).items()}
    own = directories(os.getpid())
    # In the root of a hierarchy of version 1, `directories` has none.
    out = [own.get(one) or mounts[one].path for one in LEFT if one in mounts] or [own[UNIFIED]]
    cgroup = Cgroup(*named(spec.cgroups_path))

    def excess_below(init: int) -> list[str]:
        return [] if allowance is None else look(init, spec, allowance, mounts)

    return Gate(lambda criu: take_out(criu, out), excess_below, cgroup.kill, settle, awaited=awaited)


@asynccontextmanager
async def held_back(
    spec: Spec, allowance: PrivilegeAllowance | None, awaited: Awaited | None = None, settled: Settled | None = None
) -> AsyncIterator[Gate | None]:
    """Answer the script of one restore while the body runs; None where nothing is to be done before processes run."""
    if not must_hold(allowance, awaited, settled):
        yield None
        return
    gate = _gate(spec, allowance, awaited, settled.settle if settled is not None else lambda init: None)
    async with asked(gate.answer) as gate.environment:
        try:
            yield gate
        finally:
            if awaited is not None:
                awaited.stop()


def look(init: int, spec: Spec, allowance: PrivilegeAllowance, mounts: Mapping[str, MountPoint]) -> list[str]:
    """Return a sentence for everything that the processes below `init` have beyond what is allowed.

    Those that the kernel would spare longer than the specification wants, when memory runs out, are put right instead:
    that value follows from a node's memory, and differs between nodes without any change of configuration.
    """
    cgroups = cgroup_names(spec.cgroups_path, mounts)
    pids = process_tree(init)
    found = list(outside(pid for pid in pids if not is_exiting(pid)))
    for pid in pids:
        for one in of_process(pid, cgroups):
            found += excess(one, allowance)
        wanted = spec.process.get("oomScoreAdj")
        if wanted is not None and oom_score_adj(pid) < wanted:
            set_oom_score_adj(pid, int(wanted))
    return list(dict.fromkeys(found))


def end_held(init: int, criu: int) -> None:
    """Kill the processes that CRIU holds, and CRIU after them.

    In this order: when CRIU dies, it detaches from those that are still alive. And it must die: it would wait for init,
    and init for the others, which stay zombies until CRIU, who traces them, has noticed that they are dead.
    """
    for pid in [*process_tree(init), criu]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # init has taken them with it


def cgroup_names(cgroups_path: str, mounts: Mapping[str, MountPoint]) -> dict[str, str]:
    """Return the container's cgroup in every hierarchy where it exists, by controller, as /proc/PID/cgroup names it."""
    if not cgroups_path:
        return {}
    name = plain_path(cgroups_path)
    existing = {controller: mount for controller, mount in mounts.items() if (mount.path / name).is_dir()}
    return {controller: f"{mount.root.rstrip('/')}/{name}" for controller, mount in existing.items()}


def take_out(criu: int, cgroups: Sequence[Path]) -> None:
    """Move CRIU out of the container's cgroup, where the runtime has put it, into `cgroups`, which are this daemon's.

    A pod that has used up its number of processes or its memory could otherwise keep CRIU from executing the script,
    and CRIU would let the processes run without it. Killing the whole cgroup would kill CRIU as well, which releases
    processes when it dies. Each move waits for the kernel, 10 ms or more, so that of version 1 only the hierarchies
    that matter are left, and CRIU continues meanwhile: it puts the processes into their cgroups by name, wherever it is
    itself. Raises OSError.
    """
    for directory in cgroups:
        (directory / "cgroup.procs").write_text(str(criu))
