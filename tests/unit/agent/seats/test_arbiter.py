"""The arbiter's loop: what the node reports becomes the state of its seats, and decisions become acts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from kybernate.agent.seats import arbiter as arbiter_module
from kybernate.agent.seats.around import Active, NoUse
from kybernate.agent.seats.claims import Key
from kybernate.messages import agent_pb2 as wire
from kybernate.seats.model import Rules
from kybernate.verbs.room import Taker
from tests.unit.agent.seats.fake_seats import RULES, FakeNode, until


def run(work: object) -> None:
    asyncio.run(asyncio.wait_for(work, 60))  # type: ignore[arg-type]


def test_a_request_suspends_what_is_active_and_wakes() -> None:
    async def work() -> None:
        node = FakeNode()
        a, b = node.add("a", "attached", seat="g0-s0"), node.add("b", seat="g0-s1")
        async with node.arbitrating() as arbiter:
            await until(lambda: node.status(a) == "active")
            arbiter.ask(b, "api")
            await until(lambda: node.status(b) == "active")
            assert (node.status(a), node.done, node.most_together) == ("suspended", ["suspended a", "attached b"], 1)

    run(work())


def test_only_what_has_computed_since_the_last_look_is_busy() -> None:
    """A mark falls where the program that asks the driver was started again."""

    async def work() -> None:
        node = FakeNode()
        a = node.add("a", "attached", seat="g0-s0")
        node.marks[a] = 7
        async with node.arbitrating() as arbiter:
            await until(lambda: node.status(a) == "active")
            for mark, busy in ((0, False), (9, True)):
                node.marks[a] = mark
                await arbiter.look()
                await until(lambda: arbiter._kept[a].mark == mark)  # noqa: B023
                assert arbiter.state.seats["g0-s0"].busy == busy

    run(work())


def test_work_ends_with_the_newest_sample_and_calls_of_the_library_are_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watcher(NoUse):
        counted = 0

        def calls(self, container: Key) -> int | None:
            return self.counted

    async def work() -> None:
        node, watcher = FakeNode(), Watcher()
        a = node.add("a", "attached", seat="g0-s0")
        node.marks[a] = 7
        async with node.arbitrating(watcher=watcher) as arbiter:
            await until(lambda: node.status(a) == "active")
            assert not arbiter.state.seats["g0-s0"].busy
            node.marks[a] = 8
            await until(lambda: arbiter.state.seats["g0-s0"].busy)
            node.resting.add(a)
            await until(lambda: not arbiter.state.seats["g0-s0"].busy)
            watcher.counted += 1
            arbiter.wake()
            await until(lambda: arbiter.state.seats["g0-s0"].busy)
            assert arbiter.active() == {a: frozenset({1})}
            await until(lambda: not arbiter.state.seats["g0-s0"].busy)
            monkeypatch.setattr(arbiter_module, "SAMPLE_SECONDS", 0.0)  # a driver that takes no sample without work
            node.resting.clear()
            node.marks[a] = 9
            await until(lambda: arbiter._kept[a].mark == 9)
            assert not arbiter.state.seats["g0-s0"].busy

    run(work())


def test_driver_is_asked_more_often_while_a_seat_waits_for_the_pause_of_another() -> None:
    async def work() -> None:
        node = FakeNode()
        a, b = node.add("a", "attached", seat="g0-s0"), node.add("b", seat="g0-s1")
        rules = replace(RULES, slice=3600, yield_after=3600)
        async with node.arbitrating(rules) as arbiter:
            await until(lambda: node.status(a) == "active")
            assert not arbiter._soon.is_set()
            arbiter.ask(b, "api")
            await until(arbiter._soon.is_set)
            before = node.looks
            await until(lambda: node.looks > before + 1)
            arbiter.forget(b)
            await until(lambda: not arbiter._soon.is_set())
            assert node.status(a) == "active"

    run(work())


def test_seat_without_room_beside_one_that_works_is_crowded() -> None:
    async def work() -> None:
        node = FakeNode()
        a, b = node.add("a", "attached", seat="g0-s0"), node.add("b", seat="g0-s1")
        async with node.arbitrating() as arbiter:
            await until(lambda: node.status(a) == "active")
            assert node.crowded == set()
            node.known[a].active_until.FromSeconds(1 << 33)
            arbiter.wake()
            await until(lambda: node.crowded == {"g0-s1"})
            node.known[a].active_until.FromSeconds(0)
            arbiter.wake()
            await until(lambda: node.crowded == set())
            assert node.status(b) == "suspended"

    run(work())


def test_programs_may_begin_in_their_turn_alone() -> None:
    """Also in a swap: what comes may begin once what leaves has left."""

    async def work() -> None:
        node = FakeNode()
        a, b = node.add("a", "attached", seat="g0-s0"), node.add("b", seat="g0-s1")
        async with node.arbitrating() as arbiter:
            await until(lambda: node.shown == {a: True, b: False})
            node.holding_up = True
            arbiter.ask(b, "use")
            await until(lambda: node.status(a) == "suspending")
            await until(lambda: node.shown == {a: False, b: False})
            node.holding_up = False
            await until(lambda: node.shown == {a: False, b: True})
            assert (node.status(a), node.status(b)) == ("suspended", "active")

    run(work())


def test_what_was_active_together_before_the_arbiter_is_separated() -> None:
    async def work() -> None:
        node = FakeNode()
        keys = [node.add(name, "attached", seat=f"g0-s{number}") for number, name in enumerate("abc")]
        async with node.arbitrating():
            await until(lambda: sorted(map(node.status, keys)) == ["active", "suspended", "suspended"])
            assert len(node.holding) == 1

    run(work())


def test_starts_wait_for_their_turn() -> None:
    async def work() -> None:
        node = FakeNode()
        keys = [node.add(name, "", seat=f"g0-s{number}") for number, name in enumerate("abc")]
        async with node.arbitrating():
            await asyncio.gather(*map(node.start, keys))
            await until(lambda: "active" in map(node.status, keys))
            assert node.most_together == 1
            assert len(node.done) == 2  # two suspends

    run(work())


def test_a_wake_that_fails_is_tried_again_and_blocks_no_other() -> None:
    async def work() -> None:
        node = FakeNode(failing={"bad"})
        bad, good = node.add("bad", seat="g0-s0"), node.add("good", seat="g0-s1")
        async with node.arbitrating(replace(RULES, retries=1)) as arbiter:
            await until(lambda: node.status(bad) == "suspended")
            arbiter.ask(bad, "api")
            await until(lambda: node.status(bad) == "failed")
            assert "the driver has refused" in arbiter.error_of(bad)
            arbiter.ask(good, "api")
            await until(lambda: node.status(good) == "active")
            node.failing.clear()
            arbiter.ask(bad, "api")
            await until(lambda: node.status(bad) == "active")
        assert [type for type, _ in node.said].count("seat.failed") == 2

    run(work())


def test_an_operation_that_waits_for_room_is_a_request_and_is_let_in() -> None:
    async def work() -> None:
        node = FakeNode()
        a, b = node.add("a", "attached", seat="g0-s0"), node.add("b", seat="g0-s1")
        heard: list[str] = []
        async with node.arbitrating():
            await until(lambda: node.status(a) == "active")
            async with node.room.taken(Taker(*b, operation="b"), heard.append):
                assert node.status(b) in ("waking", "active")
                assert not node.holding.get(a)
            await until(lambda: node.status(b) == "active")
        assert heard

    run(work())


def test_an_operation_that_gives_up_leaves_no_request() -> None:
    async def work() -> None:
        node = FakeNode()
        a, b = node.add("a", "attached", seat="g0-s0"), node.add("b", seat="g0-s1")
        node.failing.add("a")
        async with node.arbitrating(replace(RULES, backoff=1000)) as arbiter:
            await until(lambda: node.status(a) == "active")
            waits = asyncio.create_task(_take(node, Taker(*b, operation="b")))
            await until(lambda: bool((seat := arbiter.seat_of(b)) and seat.requests))
            waits.cancel()
            await until(lambda: bool((seat := arbiter.seat_of(b)) and not seat.requests))

    run(work())


async def _take(node: FakeNode, taker: Taker) -> None:
    async with node.room.taken(taker, lambda reason: None):
        pass


def test_a_container_that_ends_frees_its_seat_whatever_is_done_to_it() -> None:
    async def work() -> None:
        node = FakeNode()
        a, b = node.add("a", "attached", seat="g0-s0"), node.add("b", seat="g0-s1")
        async with node.arbitrating() as arbiter:
            await until(lambda: node.status(a) == "active")
            arbiter.ask(b, "api")
            await until(lambda: node.status(a) == "suspending")
            node.end(a)
            await until(lambda: node.status(b) == "active")
            assert node.seats["g0-s0"].status == "free"

    run(work())


def test_use_is_a_request_unless_the_container_says_otherwise() -> None:
    class Watcher:
        async def run(self, suspended: Callable[[], Collection[Key]], used: Callable[[Key], None], _: Active) -> None:
            await until(lambda: len(suspended()) == 1)
            used(b)
            used(a)

        def calls(self, container: Key) -> int | None:
            return None

    a, b = ("k8s.io", "a"), ("k8s.io", "b")

    async def work() -> None:
        node = FakeNode()
        node.add("a", seat="g0-s0")
        node.add("b", seat="g0-s1", wake_on_use=False)
        async with node.arbitrating(watcher=Watcher()):
            await until(lambda: node.status(a) == "active")
            assert node.status(b) == "suspended"

    run(work())


def test_a_container_without_kubernetes_gets_a_seat_and_keeps_it() -> None:
    async def work() -> None:
        node = FakeNode()
        node.add("pod", seat="g0-s0")
        keys = [node.add(name, profile="one") for name in "abcd"]
        async with node.arbitrating() as arbiter:
            await until(lambda: len(node.labels) == 3)
            assert sorted(node.labels.values()) == ["g0-s1", "g0-s2", "g0-s3"]
            assert ("seat.lacking", "all seats of profile one are taken") in node.said
            (without,) = set(keys) - set(node.labels)
            assert arbiter.grant(Taker(*without), ()) == "all seats of profile one are taken"
        for key, name in node.labels.items():
            node.claimed[key] = replace(node.claimed[key], seat=name)
        known, node.labels = dict(node.labels), {}
        async with node.arbitrating() as arbiter:
            await until(arbiter.ready.is_set)
            assert {key: name for name, key in arbiter.keys.items() if key in known} == known
            assert node.labels == {}

    run(work())


def test_a_standby_takes_the_place_of_one_whose_container_ends() -> None:
    async def work() -> None:
        node = FakeNode()
        first, other = node.add("first", "attached", seat="g0-s0"), node.add("other", seat="g0-s2")
        standby = node.add("standby", seat="g0-s1", stands_by_for="first")
        async with node.arbitrating(Rules(ram_low=0, ram_high=0)) as arbiter:
            await until(lambda: node.status(first) == "active")
            arbiter.ask(other, "api")
            node.end(first)
            await until(lambda: node.status(standby) == "active")
            assert node.status(other) == "suspended"

    run(work())


def test_containers_wait_until_the_node_has_been_read() -> None:
    async def work() -> None:
        node = FakeNode()
        key = node.add("a", "", seat="g0-s0")
        async with node.arbitrating() as arbiter:
            assert arbiter.grant(Taker(*key), ()) == "the agent reads the state of the node's seats"
            assert arbiter.grant(Taker("k8s.io", "unknown"), ()) == "the agent reads the container's record"
            assert (
                arbiter.grant(Taker("k8s.io", "unknown", operation="1"), ()) == "the agent reads the container's record"
            )
            to_be_made = Taker("k8s.io", "unknown", operation="1", exists=False)
            assert arbiter.grant(to_be_made, ()) == ""  # by a restore; its shim asks when it starts
            assert arbiter.grant(Taker("k8s.io", "gone", operation="1"), ()) == ""  # which fails for that
            await node.start(key)
            await until(lambda: node.status(key) == "active")

    run(work())


def test_nothing_is_decided_before_the_driver_has_answered() -> None:
    """After a restart of the agent, a wake that waits must not be let in next to what computes."""

    async def work() -> None:
        node = FakeNode(silent=True)
        node.add("a", "attached", seat="g0-s0")
        b = node.add("b", seat="g0-s1")
        taking = asyncio.create_task(_take(node, Taker(*b, operation="b")))
        async with node.arbitrating() as arbiter:
            await until(lambda: Taker(*b, operation="b") in node.room.waiting)
            for _ in range(20):
                node.changed()
                await asyncio.sleep(0.001)
            assert (node.done, arbiter.ready.is_set()) == ([], False)
            node.silent = False
            await taking
            await until(lambda: node.status(b) == "active")
        assert node.done == ["suspended a", "attached b"]
        assert node.most_together == 1

    run(work())


def test_what_a_former_run_has_decided_and_that_waits_is_cancelled() -> None:
    async def work() -> None:
        node = FakeNode(own={"b"})
        a, b = node.add("a", "attached", seat="g0-s0"), node.add("b", seat="g0-s1")
        waits = asyncio.create_task(_take(node, Taker(*b, operation="b")))
        async with node.arbitrating() as arbiter:
            await until(lambda: node.cancelled == ["b"])
            assert (node.status(a), node.status(b), arbiter.seat_of(b).requests) == ("active", "suspended", ())  # type: ignore[union-attr]
            waits.cancel()
            arbiter.ask(b, "api")
            await until(lambda: node.status(b) == "active")
        assert node.cancelled == ["b"]
        assert node.most_together == 1

    run(work())


def test_a_driver_that_is_silent_at_first_is_asked_again_though_no_container_has_a_seat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arbiter_module, "LOOK_SECONDS", 0.01)

    async def work() -> None:
        node = FakeNode(silent=True)
        async with node.arbitrating() as arbiter:
            await until(lambda: node.looks > 1, seconds=10)
            node.silent = False
            key = node.add("a", "", seat="g0-s0")
            await node.start(key)
            assert arbiter.ready.is_set()

    run(work())


def test_a_swap_of_another_caller_makes_its_own_room() -> None:
    """It has both containers for itself, so that a suspend of the one that leaves would wait for its end."""

    async def work() -> None:
        node = FakeNode()
        a, b = node.add("a", "attached", seat="g0-s0"), node.add("b", seat="g0-s1")
        node.swaps["b"] = a
        async with node.arbitrating():
            await until(lambda: node.status(a) == "active")
            async with node.room.taken(Taker(*b, operation="b"), lambda reason: None):
                assert node.status(a) == "suspending"
            await until(lambda: node.status(b) == "active")
            assert node.status(a) == "suspended"
        assert node.done == ["suspended a", "attached b"]
        assert "suspend" not in node.asked

    run(work())


def test_what_was_let_in_has_its_room_whatever_is_reported_of_it() -> None:
    """A wake is let in because its seat is active; then the report comes by which it was suspended before."""

    async def work() -> None:
        node = FakeNode()
        a, b = node.add("a", "attached", seat="g0-s0"), node.add("b", seat="g0-s1")
        async with node.arbitrating() as arbiter:
            await until(lambda: node.status(a) == "active")
            async with node.room.taken(Taker(*a, operation="a"), lambda reason: None):
                node.known[a].gpu = wire.Container.SUSPENDED
                node.holding.clear()
                arbiter.ask(b, "api")
                await until(lambda: node.status(a) == "waking")
                for _ in range(20):
                    node.changed()
                    await asyncio.sleep(0.001)
                assert node.status(b) == "suspended"
                await node.wake("", a)
            await until(lambda: node.status(b) == "active")
        assert node.done == ["attached a", "suspended a", "attached b"]
        assert node.most_together == 1

    run(work())


@pytest.mark.parametrize("missing", ["silent", "away"])
def test_an_outcome_counts_once_the_node_has_been_looked_at(missing: str) -> None:
    """A suspend that has failed leaves a container that computes, whatever was seen in the middle of it."""

    async def work() -> None:
        node = FakeNode()
        a, b = node.add("a", "attached", seat="g0-s0"), node.add("b", seat="g0-s1")
        async with node.arbitrating() as arbiter:
            await until(lambda: node.status(a) == "active")
            node.failing, node.holding_up = {"a"}, True
            arbiter.ask(b, "api")
            await until(lambda: node.known[a].gpu == wire.Container.SUSPENDING)
            memory = node.holding.pop(a)  # for a moment
            assert await arbiter.look()
            node.holding[a] = memory
            setattr(node, missing, True)
            node.holding_up = False
            for _ in range(20):
                node.changed()
                await asyncio.sleep(0.001)
            assert (node.status(a), node.known[b].gpu) == ("suspending", wire.Container.SUSPENDED)
            node.failing = set()
            setattr(node, missing, False)
            await until(lambda: node.status(b) == "active")
        assert node.done == ["suspended a", "attached b"]
        assert node.most_together == 1

    run(work())


def test_random_events_never_have_two_on_one_gpu() -> None:
    """Requests, failures, ends and new arbiters in any order; in the end each container gets its turn."""

    async def work() -> None:
        chance = random.Random(7)
        node = FakeNode(gpus=2)
        keys = [node.add(f"c{number}", seat=f"g{number % 2}-s{number // 2}") for number in range(8)]
        for _ in range(4):
            async with node.arbitrating() as arbiter:
                await until(arbiter.ready.is_set)
                for _ in range(60):
                    arbiter.ask(chance.choice(keys), "api")
                    node.failing = {f"c{chance.randrange(24)}"}
                    await asyncio.sleep(0.001)
        node.failing = set()
        async with node.arbitrating() as arbiter:
            await until(arbiter.ready.is_set)
            for key in keys:
                node.done.clear()
                await until(lambda key=key: bool(arbiter.ask(key, "api")) or node.status(key) == "active")  # type: ignore[misc]
        assert node.most_together == 1

    run(work())
