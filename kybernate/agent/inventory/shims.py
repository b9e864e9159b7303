"""What a container's shim says of it."""

from __future__ import annotations

from kybernate.agent.inventory.state import Reported
from kybernate.node.failure import Failure, Missing
from kybernate.node.lookup import KnownContainer
from kybernate.node.shim import NotKybernate, named_kybernate, shim_of


async def ask(container: KnownContainer, address: str) -> Reported:
    """Return what the shim of a container with a task says. Raises no expected error: it becomes the problem.

    A shim that is not ours is only a problem where containerd's name of the runtime says that it is.
    """
    try:
        async with shim_of(container, address) as shim:
            found = await shim.status(container.id)
    except NotKybernate:
        return Reported(foreign=True)
    except Missing:
        return Reported()  # it has ended, or was not begun: an event says so next
    except Failure as error:
        return Reported(problem=str(error)) if named_kybernate(container) else Reported(foreign=True)
    return Reported(found[0]) if found else Reported(problem="its shim does not know it")
