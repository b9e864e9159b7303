"""What the requests of operations mean on a node."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kybernate.node.failure import Failure, Invalid, Missing, NoImage, Refused
from kybernate.store.tiers.tier import Ref
from kybernate.verbs.checkpoint import Checkpoint
from kybernate.verbs.delete import Delete
from kybernate.verbs.export import Export
from kybernate.verbs.importing import Import
from kybernate.verbs.model import Arguments
from kybernate.verbs.node import Elsewhere
from kybernate.verbs.restore import Restore
from kybernate.verbs.swap import Swap
from kybernate.verbs.verify import Verify
from kybernate_shim.checkpoint.image.manifest import Source
from tests.unit.agent.operations.hands import ID, Hands
from tests.unit.cli.conftest import Node as FakeNode
from tests.unit.cli.conftest import node as node
from tests.unit.cli.saved_image import save


def test_checkpoint_gets_a_place_of_its_own(node: FakeNode, counter: Any) -> None:
    hands = Hands(node, gpus_of=lambda id: ("GPU-1",))
    node.checkpoints.mkdir()
    target = hands.resolve(Checkpoint("count"))
    assert (target.container, target.image) == ("counter", str(node.checkpoints / f"counter-{ID}"))
    assert target.writes == target.image
    assert target.holds == ("container default/counter", f"path {target.image}")
    assert target.copies[0] == "gpu GPU-1"
    assert target.copies[1].startswith("disk ")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (Checkpoint("nothing"), Missing),
        (Checkpoint("ended"), Missing),
        (Checkpoint("counter", path="../up"), Invalid),
        (Checkpoint("counter", path=".."), Invalid),
        (Checkpoint("counter", path="/a/../b"), Invalid),
        (Checkpoint("counter", path="first"), Refused),
        (Swap("counter", "coun"), Invalid),
        (Verify("nothing"), NoImage),
        (Delete("nothing"), NoImage),
        (Delete("pinned"), Refused),
        (Restore("first", name="counter"), Refused),
        (Export("first", "relative"), Invalid),
        (Export("first", "/proc/version"), Refused),
        (Export("first", "/no/such/directory/x.tar"), Invalid),
        (Import("/no/such/archive"), Failure),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    node: FakeNode, counter: Any, arguments: Arguments, error: type[Failure]
) -> None:
    node.containerd.add("ended", state="")
    save(node.checkpoints / "first")
    save(node.checkpoints / "pinned")
    before = list(node.containerd.calls)
    with pytest.raises(error):
        Hands(node, is_pinned=lambda path: path.name == "pinned").resolve(arguments)
    assert node.containerd.calls == before


def test_image_that_is_elsewhere_arrives_for_its_restore(node: FakeNode) -> None:
    found = Elsewhere(Ref("team", "web", "abc"), Source("counter", "team", "pod", "web", image="busybox:1"), ["GPU-1"])
    asked = []

    def elsewhere(name: str, stored: bool) -> Elsewhere | None:
        asked.append((name, stored))
        return found if name == "team/web" else None

    save(node.checkpoints / "team" / "web")
    hands = Hands(node, elsewhere=elsewhere)
    assert hands.resolve(Restore("team/web")).image == str(node.checkpoints / "team" / "web")
    target = hands.resolve(Restore("team/web", from_store=True))
    assert (target.image, target.ref) == ("abc", ("team", "web", "abc"))
    assert (target.namespace, target.container) == ("k8s.io", f"web-{ID}")
    assert (target.holds, target.copies) == ((f"container k8s.io/web-{ID}",), ("gpu GPU-1",))
    shutil.rmtree(node.checkpoints / "team")
    assert hands.resolve(Restore("team/web")).ref == ("team", "web", "abc")
    assert asked == [("team/web", True), ("team/web", False)]
    with pytest.raises(NoImage, match="no checkpoint image"):
        hands.resolve(Restore("nothing"))
    with pytest.raises(NoImage, match="the object store has no image nothing"):
        hands.resolve(Restore("nothing", from_store=True))


def test_image_outside_of_the_roots_is_not_deleted(hands: Hands, tmp_path: Path) -> None:
    save(tmp_path / "elsewhere")
    with pytest.raises(Failure, match="neither below"):
        hands.resolve(Delete(str(tmp_path / "elsewhere")))
