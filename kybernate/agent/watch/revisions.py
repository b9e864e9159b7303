"""Revisions: numbers of changes that rise with each change, also over restarts of the agent. Pure.

The upper half of a revision is the id of the last durable event, the lower half counts the changes since. Ids of events
rise without gaps in the journal, and each start of the agent records one before anything else; so a revision is greater
than all of earlier runs without any further write to the disk, whatever the clock does. It also says which events its
holder has seen, whichever run of the agent gave it: a client that was away over a restart gets exactly the others.
Numbers from the clock would repeat after it was set back; a persisted mark costs writes, and names no event.
"""

from __future__ import annotations

COUNT_BITS = 32


def of_event(id: int) -> int:
    """Return the revision of the change that delivers event `id`."""
    return id << COUNT_BITS


def last_event(revision: int) -> int:
    """Return the id of the last event that the holder of a revision has seen; 0 where there is none."""
    return revision >> COUNT_BITS
