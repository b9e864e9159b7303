"""What a container's shim says of it."""

from __future__ import annotations

from kybernate.agent.inventory.state import Told
from kybernate.node.failure import Failure
from kybernate.node.lookup import KnownContainer
from kybernate.node.shim import NoTask, NotKybernate, named_kybernate, shim_of


async def ask(container: KnownContainer, address: str) -> Told:
    """Return what the shim of a container with a task says. Raises no expected error: it becomes the problem.

    A shim that is not ours is only a problem where containerd's name of the runtime says that it is.
    """
    try:
        async with shim_of(container, address) as shim:
            found = await shim.status(container.id)
    except NotKybernate:
        return Told(foreign=True)
    except NoTask:
        return Told()  # it has ended, or was not begun: an event says so next
    except Failure as error:
        return Told(problem=str(error)) if named_kybernate(container) else Told(foreign=True)
    return Told(found[0]) if found else Told(problem="its shim does not know it")
