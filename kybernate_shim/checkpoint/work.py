"""The directory for CRIU's logs and scratch files: kept unless it is empty after a failure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kybernate_shim.trust.places import make_private


@contextmanager
def working_in(work: Path, *, without: Sequence[str]) -> Iterator[None]:
    """Make the directory, without the files of an earlier attempt, which must not be taken for this one's.

    What fails before CRIU has written anything leaves none behind: a kubelet tries what is refused again and again.
    Raises Refused and OSError.
    """
    made = make_private(work)
    for name in without:
        (work / name).unlink(missing_ok=True)
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):
                work.rmdir()  # only if it is empty
        raise
