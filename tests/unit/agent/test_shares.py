"""What one container may have in flight, shared by several proxies: never more than the limit, whatever happens."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kybernate.agent.inventory.shares import MOST_HOLDERS, SETTLE_SECONDS, Holding, Shares, divided
from kybernate.node.failure import Exhausted

MODEL = "k8s.io/qwen"


class World:
    """Shares, with a clock, and holders that take what they are told when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.told: dict[str, int] = {}
        self.begin()
        self.now += SETTLE_SECONDS

    def begin(self) -> None:
        """The agent begins."""
        self.seen: dict[str, int] = {}
        self.shares = Shares(self._tell, lambda: self.now)

    def _tell(self, subject: str, holder: str, found: Holding) -> None:
        self.told[holder], self.seen[holder] = found.granted, found.number

    def ask(self, holder: str, wanted: int, held: int = 0, limit: int = 8) -> int:
        seen = self.seen.get(holder, 0)
        found = self.shares.ask(MODEL, holder, limit=limit, wanted=wanted, held=held, seconds=10, seen=seen)
        self.seen[holder] = found.number
        return found.granted


@pytest.mark.parametrize(
    ("wanted", "limit", "shares"),
    [
        ({"a": 1}, 8, {"a": 8}), ({"a": 0}, 8, {"a": 0}), ({"a": 9, "b": 9}, 8, {"a": 4, "b": 4}),
        ({"a": 2, "b": 30}, 8, {"a": 2, "b": 6}), ({"a": 1, "b": 1, "c": 0}, 8, {"a": 4, "b": 4, "c": 0}),
        ({"a": 1, "b": 1}, 1, {"a": 1, "b": 0}), ({"a": 5, "b": 5, "c": 5}, 2, {"a": 1, "b": 1, "c": 0}), ({}, 3, {}),
    ],
)  # fmt: skip
def test_limit_is_divided_evenly_up_to_what_each_wants(
    wanted: dict[str, int], limit: int, shares: dict[str, int]
) -> None:
    assert divided(wanted, limit) == shares


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 50), max_size=8), st.integers(0, 40))
def test_division_is_whole_and_within_the_limit(wanted: dict[str, int], limit: int) -> None:
    shares = divided(wanted, limit)
    assert sum(shares.values()) == (limit if any(wanted.values()) else 0)
    assert all(shares[name] == 0 for name, count in wanted.items() if not count)


def test_one_proxy_has_all_of_it() -> None:
    world = World()
    assert world.ask("a", 1) == 8
    assert world.shares.holders(MODEL) == 1


def test_share_of_another_one_begins_when_the_first_keeps_to_its_own() -> None:
    world = World()
    world.ask("a", 8)
    assert world.ask("b", 8) == 0
    assert world.told == {"a": 4}
    world.ask("a", 8, held=6)  # two of its eight have ended
    assert world.told["b"] == 2
    world.ask("a", 8, held=4)
    assert world.told["b"] == 4


def test_share_of_a_proxy_that_is_killed_ends() -> None:
    world = World()
    world.ask("a", 8, held=8)
    world.ask("b", 8)
    world.now += 5
    world.ask("b", 8)
    world.shares.expire()
    assert "b" not in world.told
    world.now += 6
    world.shares.expire()
    assert world.told["b"] == 8


def test_two_that_share_one_request_take_turns() -> None:
    world = World()
    assert world.ask("a", 1, limit=1) == 1
    assert world.ask("b", 1, limit=1) == 0
    assert world.told.pop("a") == 0
    world.now += 1
    assert world.ask("a", 1, held=0, limit=1) == 0
    assert world.told["b"] == 1


def test_what_was_held_before_the_agent_began_is_granted_and_no_more() -> None:
    world = World()
    world.now -= SETTLE_SECONDS
    world.begin()
    assert world.ask("b", 8) == 0
    assert world.ask("a", 8, held=5) in (4, 5)
    world.now += SETTLE_SECONDS
    world.ask("a", 8, held=4)
    assert world.told["b"] == 4


def test_holders_are_bounded() -> None:
    world = World()
    for number in range(MOST_HOLDERS):
        world.ask(str(number), 1)
    with pytest.raises(Exhausted, match="share"):
        world.ask("one more", 1)


@dataclass
class Proxy:
    """One holder: requests, what it has read, and what was sent in both directions and not read yet, in order."""

    granted: int = 0
    seen: int = 0
    in_flight: int = 0
    waiting: int = 0
    asked_at: float = -100.0
    sent: list[tuple[int, int, int]] = field(default_factory=list)  # wanted, held, seen
    mail: list[tuple[int, int]] = field(default_factory=list)  # granted, number


class Proxies(RuleBasedStateMachine):
    """Three proxies that begin and end requests, and are killed, while what they and the agent say arrives late."""

    LIMIT = 5
    ANY = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.proxies = {name: Proxy() for name in "abc"}
        self.shares = Shares(self._tell, lambda: self.now)
        self.now += SETTLE_SECONDS

    def _tell(self, subject: str, holder: str, found: Holding) -> None:
        self.proxies[holder].mail.append((found.granted, found.number))

    @rule(name=ANY, count=st.integers(1, 7))
    def requests_come(self, name: str, count: int) -> None:
        self.proxies[name].waiting += count
        self.it_asks(name)

    @rule(name=ANY)
    def one_ends(self, name: str) -> None:
        self.proxies[name].in_flight = max(0, self.proxies[name].in_flight - 1)
        self.it_begins(self.proxies[name])

    def it_begins(self, one: Proxy) -> None:
        begun = max(0, min(one.waiting, one.granted - one.in_flight))
        one.waiting -= begun
        one.in_flight += begun

    @rule(name=ANY)
    def it_asks(self, name: str) -> None:
        one = self.proxies[name]
        one.sent.append((one.in_flight + one.waiting, max(one.granted, one.in_flight), one.seen))
        one.asked_at = self.now

    @rule(name=ANY)
    def agent_reads(self, name: str) -> None:
        one = self.proxies[name]
        if one.sent:
            wanted, held, seen = one.sent.pop(0)
            found = self.shares.ask(MODEL, name, limit=self.LIMIT, wanted=wanted, held=held, seconds=10, seen=seen)
            one.mail.append((found.granted, found.number))

    @rule(name=ANY)
    def it_reads(self, name: str) -> None:
        one = self.proxies[name]
        if one.mail:
            one.granted, one.seen = one.mail.pop(0)
            self.it_begins(one)

    @rule(name=ANY)
    def it_is_killed(self, name: str) -> None:
        """Another one with another name takes its place, which here is one that knows nothing after some time."""
        self.proxies[name] = Proxy()
        self.now += 20
        self.shares.expire()
        for other in self.proxies.values():
            other.granted, other.in_flight = 0, 0
            other.mail.clear()
            other.sent.clear()

    @invariant()
    def limit_holds_over_all(self) -> None:
        assert sum(one.in_flight for one in self.proxies.values()) <= self.LIMIT

    def teardown(self) -> None:
        """Each of those that wait has its turn, once everything that was said has arrived."""
        for _ in range(60):
            for name, one in self.proxies.items():
                one.in_flight = 0
                self.it_asks(name)
                while one.sent:
                    self.agent_reads(name)
                for other in self.proxies:
                    while self.proxies[other].mail:
                        self.it_reads(other)
        assert not any(one.waiting for one in self.proxies.values())


Proxies.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestProxies = Proxies.TestCase
