"""What a specification allows, and what is found beyond it: a table of single facts, and properties of all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.checkpoint.image.manifest import Host, Manifest, Program, Source, decode, encode
from kybernate_shim.checkpoint.privileges import node_allowance
from kybernate_shim.linux.credentials import (
    INFINITY,
    NAMESPACES,
    Capabilities,
    ProcessCredentials,
    capability_bits,
    is_below,
)
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.credentials import (
    NeedsCapability,
    PrivilegeAllowance,
    Security,
    allowance_of,
    excess,
    excess_of,
    seccomp_digest,
    security_of,
)

DEFAULT = ["CAP_CHOWN", "CAP_SETUID", "CAP_SETGID", "CAP_KILL"]
PROFILE = {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW"}]}
OWN = [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]
ROOT = ProcessCredentials(1, 1, "sh", (0,) * 4, (0,) * 4, node_namespaces=("user", "cgroup", "time"))
USER = replace(ROOT, uids=(1000,) * 4, gids=(1000,) * 4)


def bits(*names: str) -> int:
    return sum(1 << capability_bits()[f"CAP_{name}"] for name in names)


def caps(*names: str) -> Capabilities:
    return Capabilities(permitted=bits(*names), effective=bits(*names), bounding=bits(*names))


def spec(*, uid: int = 0, capabilities: list[str] | None = None, seccomp: Any = None, **process: Any) -> Spec:
    allowed = DEFAULT if capabilities is None else capabilities
    sets = dict.fromkeys(("bounding", "permitted", "effective"), allowed)
    linux = {"namespaces": OWN, **({"seccomp": seccomp} if seccomp else {})}
    return Spec({"process": {"user": {"uid": uid, "gid": uid}, "capabilities": sets, **process}, "linux": linux})


def restricted(**process: Any) -> PrivilegeAllowance:
    return allowance_of(spec(uid=1000, capabilities=[], noNewPrivileges=True, **process))


CONFINED = replace(USER, no_new_privs=True)

EXCESSES = [
    (replace(CONFINED, uids=(0,) * 4), restricted(), "uid 0, the pod allows 1000 only"),
    (replace(CONFINED, uids=(1000, 0, 1000, 1000)), restricted(), "uid 0, the pod allows 1000 only"),
    (replace(CONFINED, gids=(7,) * 4, groups=(8,)), restricted(), "gid 7, 8, the pod allows 1000 only"),
    (USER, restricted(), "no_new_privs is not set, the pod sets it"),
    (
        replace(CONFINED, caps=caps("KILL")),
        restricted(),
        "bounding and permitted and effective capabilities CAP_KILL, the pod allows none",
    ),
    (replace(CONFINED, caps=Capabilities(ambient=bits("KILL"))), restricted(), "ambient capabilities CAP_KILL"),
    (replace(CONFINED, caps=Capabilities(inheritable=bits("KILL"))), restricted(), "inheritable capabilities CAP_KILL"),
    (replace(CONFINED, securebits=0x4), restricted(), "securebits 0x4"),
    (replace(CONFINED, caps=Capabilities(bounding=1 << 63)), restricted(), "bounding capabilities 0x8000000000000000"),
    (
        replace(ROOT, caps=caps("SYS_ADMIN")),
        allowance_of(spec()),
        "capabilities CAP_SYS_ADMIN, the pod allows CAP_CHOWN, CAP_KILL, CAP_SETGID, CAP_SETUID",
    ),
    # The bounding set allows it, but no_new_privs keeps uid 1000 from it.
    (
        replace(CONFINED, caps=replace(caps("CHOWN"))),
        allowance_of(spec(uid=1000, noNewPrivileges=True)),
        "permitted and effective capabilities CAP_CHOWN, the pod allows none",
    ),
    (ROOT, allowance_of(spec(seccomp=PROFILE)), "seccomp mode 0 with 0 filters, the pod's profile is mode 2 with one"),
    (
        replace(ROOT, seccomp=1),
        allowance_of(spec(seccomp=PROFILE)),
        "seccomp mode 1 with 0 filters, the pod's profile is mode 2 with one",
    ),
    (
        ROOT,
        allowance_of(spec(apparmorProfile="cri-containerd.apparmor.d")),
        "security label unconfined, the pod's is cri-containerd.apparmor.d",
    ),
    (
        replace(ROOT, label="cri-containerd.apparmor.d2"),
        allowance_of(spec(apparmorProfile="cri-containerd.apparmor.d")),
        "security label cri-containerd.apparmor.d2, the pod's",
    ),
    (
        replace(ROOT, label="a:b:c:s0:c1"),
        allowance_of(spec(selinuxLabel="a:b:c:s0:c2")),
        "label a:b:c:s0:c1, the pod's",
    ),
    *(
        (replace(ROOT, node_namespaces=(kind,)), allowance_of(spec()), f"{kind} namespace of the node")
        for kind in ("pid", "network", "ipc", "uts", "mount")
    ),
    (replace(ROOT, stray_cgroup="/system.slice"), allowance_of(spec()), "cgroup /system.slice, the pod allows"),
    (
        replace(ROOT, limits=(INFINITY,) * 16),
        allowance_of(spec(rlimits=[{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 9}])),
        "RLIMIT_NOFILE unlimited, the pod allows 1024",
    ),
    (replace(ROOT, login=1001), allowance_of(spec()), "login uid 1001, the pod's is not set"),
    (replace(ROOT, real_time=True), allowance_of(spec()), "a real-time scheduling policy"),
    (replace(ROOT, boost=5), allowance_of(spec()), "nice value -5, the pod allows 0 and more"),
    (
        replace(ROOT, uid_map=("0 5 9",), gid_map=("0 5 9",)),
        allowance_of(spec()),
        "user namespace uids 0 5 9; gids 0 5 9",
    ),
]


@pytest.mark.parametrize(("one", "allowance", "text"), EXCESSES)
def test_each_excess_is_one_sentence_with_both_values(
    one: ProcessCredentials, allowance: PrivilegeAllowance, text: str
) -> None:
    (sentence,) = excess(one, allowance)
    assert sentence.startswith("process 1 (sh): ")
    assert text in sentence


REACHED = [
    pytest.param(ROOT, allowance_of(spec()), id="as it began"),
    pytest.param(replace(ROOT, caps=caps("CHOWN", "KILL")), allowance_of(spec()), id="fewer capabilities"),
    pytest.param(replace(CONFINED, groups=(5,)), allowance_of(spec(noNewPrivileges=True)), id="root has become a user"),
    pytest.param(replace(ROOT, caps=caps("KILL")), allowance_of(spec(uid=1000)), id="sudo"),
    pytest.param(replace(ROOT, no_new_privs=True), allowance_of(spec()), id="no_new_privs by itself"),
    pytest.param(replace(ROOT, seccomp=2, filters=("a", "b")), allowance_of(spec(seccomp=PROFILE)), id="own filter"),
    pytest.param(replace(ROOT, label="p//child"), allowance_of(spec(apparmorProfile="p")), id="child profile"),
    pytest.param(replace(ROOT, label="p"), allowance_of(spec(apparmorProfile="unconfined")), id="confined by itself"),
    pytest.param(replace(CONFINED, securebits=0x10), restricted(), id="keep caps of a user"),
    pytest.param(
        replace(CONFINED, gids=(1000, 44, 44, 44), groups=(44,)),
        allowance_of(
            Spec({"process": {"user": {"uid": 1000, "gid": 1000, "additionalGids": [44]}, "noNewPrivileges": True}})
        ),
        id="additional group",
    ),
    pytest.param(
        replace(CONFINED, caps=Capabilities(permitted=bits("KILL"), ambient=bits("KILL"), bounding=bits("KILL"))),
        PrivilegeAllowance(uid=1000, gid=1000, no_new_privs=True, caps=replace(caps("KILL"), ambient=bits("KILL"))),
        id="ambient capability",
    ),
    pytest.param(
        replace(ROOT, limits=(INFINITY,) * 16, boost=5, real_time=True),
        allowance_of(spec(capabilities=["CAP_SYS_RESOURCE", "CAP_SYS_NICE"], rlimits=[{"type": "RLIMIT_NOFILE"}])),
        id="capability for it",
    ),
    pytest.param(replace(ROOT, boost=5, login=7), allowance_of(spec(), login=7, boost=5), id="the shim's own"),
]


@pytest.mark.parametrize(("one", "allowance"), REACHED)
def test_what_an_ordinary_start_can_reach_is_no_excess(one: ProcessCredentials, allowance: PrivilegeAllowance) -> None:
    assert excess(one, allowance) == []


def test_user_namespace_must_be_mapped_alike() -> None:
    ranges = [{"containerID": 0, "hostID": 100000, "size": 65536}]
    document = {"linux": {"namespaces": [*OWN, {"type": "user"}], "uidMappings": ranges, "gidMappings": ranges}}
    allowance = allowance_of(Spec({"process": {"capabilities": {}}, **document}))
    inside = replace(ROOT, node_namespaces=(), uid_map=("0 100000 65536",), gid_map=("0 100000 65536",))
    assert excess(inside, allowance) == []
    other = excess(replace(inside, uid_map=("0 0 65536",)), allowance)
    assert ["uids 0 0 65536; gids 0 100000 65536, the pod's are uids 0 100000 65536" in text for text in other] == [
        True
    ]
    none = excess(ROOT, allowance)
    assert ["user namespace of the node" in none[0], "are the node's" in none[1]] == [True, True]


def test_image_may_have_another_range_of_the_nodes_ids() -> None:
    """And its processes, once they are restored, may not."""
    ranges = [{"containerID": 0, "hostID": 200000, "size": 65536}]
    document = {"linux": {"namespaces": [*OWN, {"type": "user"}], "uidMappings": ranges, "gidMappings": ranges}}
    allowance = allowance_of(Spec({"process": {"capabilities": {}}, **document}))
    dumped = replace(ROOT, node_namespaces=(), uid_map=("0 100000 65536",), gid_map=("0 100000 65536",))
    assert excess_of([dumped], (), Security(), allowance) == []
    assert excess(dumped, allowance)
    for ranges_of in (("0 100000 65535",), ("1 100000 65536",), ("0 100000 65536", "65536 0 1"), ()):
        assert excess_of([replace(dumped, uid_map=ranges_of)], (), Security(), allowance)


def test_namespace_that_is_the_nodes_by_its_path_is_not_the_pods_own() -> None:
    """As for a pod in the network of its node."""
    spaces = [{"type": "network", "path": "/proc/self/ns/net"}, {"type": "ipc", "path": "/none"}, {"type": "pid"}]
    allowance = node_allowance(Spec({"process": {"capabilities": {}}, "linux": {"namespaces": spaces}}))
    assert allowance.namespaces == ("ipc", "pid")
    in_the_nodes = replace(ROOT, node_namespaces=("network",))
    assert excess(in_the_nodes, allowance) == []
    (text,) = excess(replace(ROOT, node_namespaces=("ipc",)), allowance)
    assert "ipc namespace of the node" in text


def test_threads_are_named() -> None:
    (sentence,) = excess(replace(USER, tid=9), restricted())
    assert sentence.startswith("thread 9 of process 1 (sh): no_new_privs")


def test_image_needs_the_recorded_profile_of_the_pod() -> None:
    filtered = replace(ROOT, seccomp=2, filters=("sha256:a", "sha256:own"))
    wanted = spec(seccomp=PROFILE)
    allowance = allowance_of(wanted)
    assert excess_of([filtered], (), security_of(wanted, [filtered]), allowance) == []
    (text,) = excess_of([filtered], (), Security(), allowance)
    assert text == f"seccomp: the profile of the image is none, the pod's is {seccomp_digest(wanted)}"
    other = security_of(spec(seccomp={**PROFILE, "defaultAction": "SCMP_ACT_LOG"}), [])
    (text,) = excess_of([filtered], (), other, allowance)
    assert other.seccomp_profile in text


def test_oldest_filter_must_be_that_of_all_threads() -> None:
    first = replace(ROOT, seccomp=2, filters=("sha256:a",))
    wanted = spec(seccomp=PROFILE)
    (text,) = excess_of(
        [first, replace(first, tid=2, filters=("sha256:b",))], (), security_of(wanted, []), allowance_of(wanted)
    )
    assert "sha256:a, sha256:b" in text


def test_what_is_held_open_needs_a_capability() -> None:
    raw = NeedsCapability("a raw socket", ("CAP_NET_RAW",))
    assert excess_of([ROOT], [raw], Security(), allowance_of(spec(capabilities=["CAP_NET_RAW"]))) == []
    (text,) = excess_of([ROOT], [raw], Security(), allowance_of(spec(capabilities=[])))
    assert text == "a raw socket in the image needs CAP_NET_RAW, the pod allows none"


@pytest.mark.parametrize("profile", [None, {}, {"syscalls": []}, {"architectures": ["SCMP_ARCH_X86_64"]}])
def test_profile_without_a_rule_is_none(profile: Any) -> None:
    assert seccomp_digest(Spec({"linux": {"seccomp": profile}})) == ""


def test_profile_digest_does_not_depend_on_the_order_of_keys() -> None:
    turned = dict(reversed(PROFILE.items()))
    assert seccomp_digest(Spec({"linux": {"seccomp": PROFILE}})) == seccomp_digest(Spec({"linux": {"seccomp": turned}}))


@pytest.mark.parametrize("document", [{}, {"process": {}, "linux": {}}, {"process": None, "linux": None}])
def test_empty_specification_allows_no_capability(document: Any) -> None:
    assert allowance_of(Spec(document)).permitted == 0


@pytest.mark.parametrize(
    ("path", "cgroup", "below"),
    [
        ("/pods/a", "/pods/a", True),
        ("/pods/a/x", "/pods/a", True),
        ("/pods/ab", "/pods/a", False),
        ("/pods", "/pods/a", False),
        ("/", "/pods/a", False),
        ("/pods/a/../b", "/pods/a", False),
        ("/../pods/a", "/pods/a", False),
        ("/pods/a", "/", True),
    ],
)
def test_cgroup_is_below_by_whole_names(path: str, cgroup: str, below: bool) -> None:
    assert is_below(path, cgroup) == below


def test_manifest_keeps_threads_that_differ() -> None:
    second, third = replace(ROOT, tid=2), replace(ROOT, tid=3, no_new_privs=True)
    security = security_of(spec(seccomp=PROFILE), [ROOT, second, third])
    assert security.processes == (ROOT, third)
    manifest = Manifest("i", "2026-01-02T03:04:05Z", Source("c"), *[Program("p", "1")] * 2, Host("6", "x", (), 2, 4096))
    assert decode(encode(replace(manifest, security=security))).security == security


sets = st.builds(Capabilities, *[st.integers(0, (1 << 64) - 1)] * 5)
ids = st.tuples(*[st.integers(0, 0xFFFFFFFF)] * 4)
anyone = st.builds(
    ProcessCredentials,
    pid=st.just(1),
    tid=st.just(1),
    name=st.just("sh"),
    uids=ids,
    gids=ids,
    groups=st.lists(st.integers(0, 0xFFFFFFFF), max_size=4).map(tuple),
    caps=sets,
    no_new_privs=st.booleans(),
    seccomp=st.integers(0, 2),
    filters=st.sampled_from([(), ("a",)]),
    node_namespaces=st.sets(st.sampled_from(NAMESPACES)).map(tuple),
)
allowances = st.builds(
    PrivilegeAllowance,
    uid=st.sampled_from([0, 1000]),
    caps=sets,
    no_new_privs=st.booleans(),
    seccomp_profile=st.sampled_from(["", "sha256:p"]),
    namespaces=st.sets(st.sampled_from([kind for kind in NAMESPACES if kind != "user"])).map(tuple),
)


@given(anyone, allowances)
def test_nothing_is_passed_beyond_the_bounding_and_inheritable_sets(
    one: ProcessCredentials, allowance: PrivilegeAllowance
) -> None:
    """The one property that must hold whatever the rules for single sets are."""
    passed = not excess(one, allowance)
    had, given = one.caps, allowance.caps
    limit = given.bounding | given.inheritable | given.permitted | given.ambient
    if (had.permitted | had.effective | had.bounding | had.ambient | had.inheritable) & ~limit:
        assert not passed
    if allowance.no_new_privs and not one.no_new_privs:
        assert not passed
    if allowance.seccomp_profile and one.seccomp != 2:
        assert not passed
    if set(allowance.namespaces) & set(one.node_namespaces):
        assert not passed


@given(anyone, allowances, sets)
def test_who_has_less_is_never_refused_for_more(
    one: ProcessCredentials, allowance: PrivilegeAllowance, mask: Capabilities
) -> None:
    fewer = Capabilities(*(had & kept for had, kept in zip(vars(one.caps).values(), vars(mask).values(), strict=True)))
    less = replace(one, caps=fewer, no_new_privs=True, seccomp=2, filters=("a",), node_namespaces=())
    if not excess(one, allowance):
        assert excess(less, allowance) == []
