"""Who pays for room in the arena: the pod, by the names that runtimes give to cgroups."""

from __future__ import annotations

import os

import pytest

from kybernate_shim.arena.accounts import account_in, account_of

ID = "8ab5" * 16
POD = "3f0d7a1c-2222-4f6e-9a55-0123456789ab"
SYSTEMD = f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD.replace('-', '_')}.slice"


@pytest.mark.parametrize(
    ("text", "account"),
    [
        (f"{SYSTEMD}/cri-containerd-{ID}.scope\n", f"pod {POD}"),
        (f"{SYSTEMD}/cri-containerd-{ID}.scope/made/by/itself\n", f"pod {POD}"),
        (f"0::/kubepods/besteffort/pod{POD}/{ID}\n", f"pod {POD}"),
        (f"12:memory:/kubepods/pod{POD}/{ID}\n1:name=systemd:/kubepods/pod{POD}/{ID}\n", f"pod {POD}"),
        (f"0::/system.slice/docker-{ID}.scope\n", f"container {ID}"),
        (f"0::/default/{ID}/deeper\n", f"container {ID}"),
        ("0::/user.slice/session-1.scope\n", "cgroup /user.slice/session-1.scope"),
        ("0::/\n", "cgroup /"),
        ("", "cgroup /"),
    ],
)
def test_pod_comes_before_its_container_and_that_before_a_cgroup(text: str, account: str) -> None:
    assert account_in(text) == account


def test_process_that_is_gone_has_no_account() -> None:
    assert account_of(1 << 30) == ""
    assert account_of(os.getpid()) != ""
