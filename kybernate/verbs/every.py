"""The list of verbs: the only one. What serves, permits and carries out requests is derived from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kybernate.verbs.checkpoint import Checkpoint
from kybernate.verbs.copy import Copy
from kybernate.verbs.delete import Delete
from kybernate.verbs.evict import Evict
from kybernate.verbs.export import Export
from kybernate.verbs.importing import Import
from kybernate.verbs.park import Park
from kybernate.verbs.restore import Restore
from kybernate.verbs.resume import Resume
from kybernate.verbs.suspend import Suspend
from kybernate.verbs.swap import Swap
from kybernate.verbs.verb import Verb
from kybernate.verbs.verify import Verify
from kybernate.verbs.wake import Sleep, Wake

# By the words of journal, events and audit log; of one service in the order of its methods.
VERBS: Final[Mapping[str, type[Verb]]] = {
    kind.verb: kind
    for kind in (
        Checkpoint, Restore, Suspend, Resume, Swap, Wake, Sleep, Park,
        Verify, Delete, Import, Export, Copy, Evict,
    )
}  # fmt: skip
BY_CALL: Final[Mapping[str, type[Verb]]] = {kind.call: kind for kind in VERBS.values()}
