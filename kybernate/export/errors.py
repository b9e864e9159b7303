"""What can fail between an image's directory and an archive, a layout or an image registry."""

from __future__ import annotations

from kybernate.node.failure import Failure


class ArtefactOdd(Failure):
    """What was read is no checkpoint image that an export has written, or it was changed on its way."""

    advice = "nothing of it was kept; push or export the image again where it is whole"
