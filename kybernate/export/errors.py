"""What can fail between an image's directory and an archive, a layout or an image registry."""

from __future__ import annotations

from kybernate.node.failure import Failure


class ImageRegistryUnreachable(Failure):
    """The image registry did not answer, or not as its protocol has it."""


class ImageRegistryRefused(Failure):
    """The image registry does not do what was requested. `status` is HTTP's, 0 where there is none."""

    def __init__(self, message: str, *, status: int = 0, state: str = "", advice: str = "") -> None:
        super().__init__(message, state=state, advice=advice)
        self.status = status


class ArtefactOdd(Failure):
    """What was read is no checkpoint image that an export has written, or it was changed on its way."""

    advice = "nothing of it was kept; push or export the image again where it is whole"


class NotPulled(Failure):
    """The image could not be put in its place."""
