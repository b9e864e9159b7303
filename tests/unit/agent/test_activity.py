"""Reports of activity: those of several reporters add up, replace each other for one, and end by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from kybernate.agent.inventory.activity import InUse, Reports
from kybernate.agent.inventory.pod_ip import pod_ip
from kybernate.agent.inventory.state import LONGEST_LABEL, MOST_LABELS, shown_labels

KEY = "k8s.io", "c1"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def said() -> list[InUse]:
    return []


@pytest.fixture
def reports(clock: Clock, said: list[InUse]) -> Reports:
    return Reports(lambda key, use: said.append(use), clock)


def test_reports_of_two_proxies_add_up_and_each_replaces_its_own(reports: Reports) -> None:
    reports.report("a", [KEY], 3, 5)
    reports.report("b", [KEY], 2, 20)
    assert reports.of(KEY) == InUse(5, 1020.0)
    reports.report("b", [KEY], 0, 20)
    assert reports.of(KEY) == InUse(3, 1005.0)


def test_report_ends_by_itself_and_says_so(reports: Reports, clock: Clock, said: list[InUse]) -> None:
    reports.report("a", [KEY], 3, 5)
    clock.now += 6
    assert reports.of(KEY) == InUse()
    reports.expire([KEY])
    assert said == [InUse(3, 1005.0), InUse()]
    reports.expire([KEY])
    assert len(said) == 2


def test_mark_rises_while_requests_are_in_flight_and_rests_afterwards(reports: Reports, clock: Clock) -> None:
    assert reports.mark(KEY) == 0
    reports.report("a", [KEY], 1, 5)
    first = reports.mark(KEY)
    clock.now += 2
    second = reports.mark(KEY)
    assert second > first > 0
    reports.report("a", [KEY], 0, 5)
    clock.now += 2
    assert reports.mark(KEY) == second


def test_what_is_gone_is_forgotten(reports: Reports) -> None:
    reports.report("a", [KEY], 1, 500)
    reports.expire([])
    assert (reports.of(KEY), reports.mark(KEY)) == (InUse(), 0)


def test_labels_of_users_are_shown_and_bounded() -> None:
    labels = {f"l{number:03}": "x" * 1000 for number in range(200)} | {"io.kubernetes.pod.name": "p", "job-name": "j"}
    found = shown_labels(labels)
    assert len(found) == MOST_LABELS
    assert found["job-name"] == "j"
    assert "io.kubernetes.pod.name" not in found
    assert {len(text) for name, text in found.items() if name != "job-name"} == {LONGEST_LABEL}


TRIE = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 127.0.0.1
        /32 host LOCAL
     |-- 10.88.0.0
        /24 link UNICAST
     |-- 10.88.0.7
        /32 host LOCAL
"""
IPV6 = "00000000000000000000000000000001 01 80 10 80       lo\nfd000000000000000000000000000007 02 40 00 80     eth0\n"


@pytest.mark.parametrize(
    ("trie", "ipv6", "found"),
    [(TRIE, IPV6, "10.88.0.7"), ("Main:\n", IPV6, "fd00::7"), ("", "", ""), ("|-- x\n", "a b\n", "")],
)
def test_address_of_a_network_is_read_from_the_kernel(tmp_path: Path, trie: str, ipv6: str, found: str) -> None:
    for pid, network in (("7", "net:[2]"), ("8", "net:[1]"), ("self", "net:[1]")):
        (tmp_path / pid / "ns").mkdir(parents=True)
        (tmp_path / pid / "net").mkdir()
        (tmp_path / pid / "ns/net").symlink_to(network)
        (tmp_path / pid / "net/fib_trie").write_text(trie)
        (tmp_path / pid / "net/if_inet6").write_text(ipv6)
    assert pod_ip(7, tmp_path) == found
    assert pod_ip(8, tmp_path) == ""  # on the node's own network
    assert pod_ip(9, tmp_path) == ""
    assert pod_ip(0, tmp_path) == ""
