"""Which tests run in which lane of the lab, and which of them share a node.

The lanes differ in containerd, runc, crun, CRIU and Python, and not in the kernel. What meets those runs in every lane.
What does not runs in some of them, with its reason here. Of two parts that name a file, the longer path has it.

The lanes with a Kubernetes cluster have the roots of the others. Their tests run in both where the subject is what
kubelet asks of containerd, and else in the one with the newer containerd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
SUITES = ("cluster", "contract", "faults", "hostile", "system")  # the folders whose tests need a node
LANES = ("trixie", "sid", "next")
DEBIANS = ("trixie", "sid")
CLUSTERS = ("cluster", "cluster-trixie")
ONE_NODE = ("--nodes", "1", "--default-runtime", "runc")  # whatever the environment says
OF_SECOND = ("sid", "next")  # of containerd's second generation
GPU_ELSEWHERE = (
    "what containerd and runc do for a container with a GPU is in the part `GPU checkpoints`, in every lane; the CRIU"
    " of `next` is that of `sid`"
)
WITHOUT_LIMITS = "not (pod or cri or container_of_two)"  # on cgroup v2 with v1's controllers; pods ask for limits


@dataclass(frozen=True)
class Part:
    """Tests that run one by one in a node of their own.

    `paths`: files and folders below tests/. `seconds`: of a CPU that it takes in one lane, by which it is placed
    among the others. `lanes`: where it runs. `why`: the reason that these are not all lanes. `flags`: of the lab.
    `samples`: single tests of other parts, which run in its lanes after the first one as well.
    """

    name: str
    paths: tuple[str, ...]
    seconds: int
    lanes: tuple[str, ...] = LANES
    why: str = ""
    flags: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()

    def files(self) -> list[Path]:
        """Return its files, in order: those that no other part names by a longer path."""
        return [file for file in all_files() if owner(file) is self]

    def samples_in(self, lane: str) -> tuple[str, ...]:
        """Return the samples that run in that lane."""
        return self.samples if lane != self.lanes[0] else ()


PARTS = (
    Part("gpu", ("system/gpu",), 25, DEBIANS, GPU_ELSEWHERE),
    Part("gpu arena", ("system/gpu/arena", "system/gpu/daemon_killed"), 50, DEBIANS, GPU_ELSEWHERE),
    Part("GPU checkpoints", (
        "system/gpu/arena/test_checkpoint.py", "system/gpu/arena/test_parked_in_place.py",
        "system/gpu/test_checkpoint.py", "system/gpu/test_nvidia_runtime.py", "system/gpu/test_pods.py",
    ), 60),
    Part(
        "daemon killed in driver",
        ("system/gpu/daemon_killed/test_in_driver.py",),
        60,
        ("sid",),
        "where in the driver a call is held is unknown to containerd, which test_in_dump.py meets in every lane",
    ),
    Part(
        "GPU data",
        (
            "system/gpu/arena/test_arriving.py", "system/gpu/arena/test_children.py",
            "system/gpu/arena/test_parking.py", "system/gpu/test_arriving.py", "system/gpu/test_data_path.py",
            "system/gpu/test_evading_children.py", "system/gpu/test_killed_shim.py", "system/gpu/test_other_gpu.py",
        ),
        85,
        ("sid",),
        "shim, CUDA helper, VRAM mover, S3 server and pretended driver; CRIU dumps and restores such programs in every"
        " lane, in test_checkpoint.py and test_children.py, with their bytes in the arena or not",
    ),
    Part(
        "seats",
        (
            *("system/gpu/test_seats.py", "system/gpu/test_seats_soak.py", "system/gpu/test_turns.py"),
            "system/gpu/test_wake_on_use.py",
        ),
        100,
        ("sid",),
        "the agent's arbiter over the shim's suspend and resume, which test_suspend.py meets in both",
    ),
    Part("faults", ("faults",), 160, ("trixie",), "the CUDA helper without a container"),
    Part("containers", ("system",), 80),
    Part("agent", ("system/test_agent.py", "system/test_agent_inventory.py"), 40),
    Part(
        "installation",
        ("system/test_readme.py",),
        40,
        DEBIANS,
        "Debian's packages, and containerd of both generations; `next` has no packages of its own",
    ),
    Part("doctor", ("system/test_doctor.py",), 15),
    Part(
        "first hour",
        ("system/test_every_command.py",),
        135,
        DEBIANS,
        "the commands of the package, and containerd of both generations; what they say of that of `next` is in"
        " test_doctor.py",
    ),
    Part(
        "one machine",
        (
            "system/test_demo.py", "system/test_page.py", "system/test_up.py", "system/test_up_file.py",
            "system/test_up_gpu.py",
        ),
        250,
        ("sid",),
        "pods and images by the CRI and the agent, which test_cri.py and test_agent.py meet in every lane",
    ),
    Part(
        "crictl",
        ("system/test_crictl.py",),
        15,
        ("next",),
        "a program of that lane alone; test_cri.py makes such calls in every lane",
    ),
    Part("checkpoints", (
        "system/test_bound_sockets.py", "system/test_checkpoint.py", "system/test_checkpoint_failures.py",
        "system/test_checkpoint_hold.py", "system/test_checkpoint_repeats.py", "system/test_identities.py",
        "system/test_kinds.py",
        "system/test_restorable.py", "system/test_restore_again.py", "system/test_restore_failures.py",
        "system/test_rootfs.py", "system/test_volumes.py",
    ), 125),
    Part(
        "GPU work cancelled",
        ("system/test_gpu_cancel.py",),
        40,
        ("trixie",),
        "shim, CUDA helper and pretended driver; a dump that is cancelled is in test_cancel.py, in every lane",
    ),
    Part(
        "fork server",
        ("system/test_fork_server.py",),
        35,
        OF_SECOND,
        "what containerd executes and what answers it; every container of every lane is started by them",
    ),
    Part(
        "suspend",
        (
            "system/gpu/arena/test_suspend.py", "system/gpu/arena/test_swap.py", "system/gpu/test_driver_failures.py",
            "system/gpu/test_pool.py", "system/gpu/test_refusals.py", "system/gpu/test_suspend.py",
        ),
        75,
        ("trixie",),
        "shim, CUDA helper and pretended driver: CRIU has no part in it, or is not reached",
    ),
    Part(
        "CUDA helper",
        ("contract/cuda_driver",),
        65,
        ("sid",),
        "CUDA helper and pretended driver without a container",
    ),
    Part(
        "arena",
        (
            "contract/cuda_driver/test_allocating.py", "contract/cuda_driver/test_arena.py",
            "contract/cuda_driver/test_arena_room.py", "contract/cuda_driver/test_arena_settings.py",
            "contract/cuda_driver/test_clean_pieces.py", "contract/cuda_driver/test_copies.py",
            "contract/cuda_driver/test_many_blocks.py", "contract/cuda_driver/test_prefetch.py",
            "contract/cuda_driver/test_zoo.py", "hostile/test_arena.py",
        ),
        210,
        ("trixie",),
        "CUDA helper, preload library and pretended driver without a container",
    ),
    Part(
        "VRAM",
        ("contract/test_vram_kernel.py", "contract/vram_driven", "contract/vram_path"),
        70,
        ("sid",),
        "the VRAM mover on the kernel, which is the machine's own in both lanes, without CRIU and runc",
    ),
    Part(
        "store",
        ("contract/registry", "contract/store"),
        35,
        ("sid",),
        "databases, object stores and transfers between nodes: Python and files, without a container",
    ),
    Part(
        "tiers",
        (
            "system/test_tiers.py", "system/test_peers.py", "contract/store/test_faulty_services.py",
            "system/gpu/test_arriving_by_agent.py",
        ),
        80,
        ("sid",),
        "files and an S3 server; containerd and CRIU meet what test_agent.py does in every lane",
    ),
    Part(
        "images",
        (
            "system/test_daemon_lasts.py", "system/test_encryption.py", "system/test_images.py",
            "system/test_restore_refusals.py",
        ),
        40,
        OF_SECOND,
        "what a daemon keeps and what the shim does with the files of an image; test_checkpoint.py has CRIU write and"
        " read them in every lane",
    ),
    Part("tenants", ("hostile",), 45),
    Part(
        "tenants' programs",
        ("hostile/test_programs.py", "hostile/test_exchanges.py"),
        180,
        DEBIANS,
        "what a program has, and CRIU dumps or not: the CRIU of `next` is that of `sid`",
    ),
    Part(
        "tenants' programs on a GPU",
        ("hostile/test_gpu_programs.py", "hostile/test_swapped_programs.py"),
        230,
        ("sid",),
        "shim and CUDA helper against a tenant's processes: what containerd, runc and CRIU do is in the part before",
    ),
    Part(
        "tenants' programs in the store",
        ("hostile/test_demoted_programs.py",),
        90,
        ("sid",),
        "agent, store and shim against a tenant's programs: what CRIU dumps is in the part before",
    ),
    Part(
        "agent's tenants",
        (
            "hostile/test_agent.py", "hostile/test_audit.py", "hostile/test_cleanup.py",
            "hostile/test_fetched_images.py", "hostile/test_foreign_images.py", "hostile/test_gpus.py",
            "hostile/test_tracing.py", "system/test_agent_clients.py", "system/test_agent_operations.py",
        ),
        35,
        ("trixie",),
        "agent, command line and shim against a tenant, and the kernel; what containerd, runc and CRIU give him is in"
        " the other files of that folder",
    ),
    Part(
        "systemd",
        ("system/test_proxy_systemd.py", "system/test_systemd.py", "system/test_up_systemd.py"),
        45,
        ("trixie",),
        "systemd and the packaged units, whatever the runtimes",
    ),
    Part(
        "node of a cluster",
        ("cluster/test_disruptions.py", "cluster/test_scale.py"),
        160,
        CLUSTERS[:1],
        "kubelet, containerd and agent as they end and come back, which no other test could stand; test_restarts.py has"
        " both versions of containerd do so",
        flags=ONE_NODE,
    ),
    Part(
        "cluster",
        ("cluster",),
        230,
        CLUSTERS[:1],
        "kubelet and its pods; what it asks of containerd is in the lane's own tests, for both versions",
        flags=ONE_NODE,
    ),
    Part(
        "events in a cluster",
        ("cluster/test_annotations.py", "cluster/test_events.py", "cluster/test_manual.py"),
        90,
        CLUSTERS[:1],
        "the node's agent and the API server, which end and come back; what the shim does is in the other files",
        flags=ONE_NODE,
    ),
    Part(
        "lane of a cluster",
        ("cluster/test_lane.py", "cluster/test_restarts.py"),
        80,
        CLUSTERS,
        "kubelet and its pods",
        flags=ONE_NODE,
        samples=(
            "cluster/test_checkpoints.py::test_pod_resumes_where_another_one_stopped",
            "cluster/test_probes.py::test_exec_probe_that_hangs_is_a_failure_and_its_process_ends",
            "cluster/test_volumes.py::test_mount_propagation_reaches_the_container",
        ),
    ),
    Part(
        "three nodes",
        ("cluster/three_nodes",),
        35,
        CLUSTERS[:1],
        "the network between nodes, and the handler that pods have who name none",
        flags=("--nodes", "3", "--default-runtime", "kybernate"),
    ),
    Part(
        "proxy",
        (
            "contract/proxy", "system/gpu/test_proxy_kills.py", "system/gpu/test_two_proxies.py",
            "system/test_proxy_postgresql.py",
        ),
        230,
        ("sid",),
        "sockets of the node, and a container that is frozen; system/gpu/test_proxy.py wakes one in both Debians",
    ),
    Part("contract", ("contract", "contract/cuda_driver/test_cuda_criu.py"), 20),
)  # fmt: skip


def all_files() -> list[Path]:
    """Return every file of tests that needs a node."""
    return sorted(file for suite in SUITES for file in (TESTS / suite).rglob("test_*.py"))


def order(parts: Sequence[Part] = PARTS) -> list[tuple[Part, str]]:
    """Return each part with each of its lanes, in the order in which they begin.

    What takes long comes before what does not: so the nodes that run side by side end together. But the lanes of a part
    are far apart, because two nodes that run it side by side would wait for each other's loop devices. So the first
    lane of what runs in several comes before everything else, then their third, and then their second with all others.
    """
    first = [(part, part.lanes[0]) for part in parts if len(part.lanes) > 1]
    third = [(part, lane) for part in parts for lane in part.lanes[2:]]
    others = [(part, lane) for part in parts for lane in part.lanes[1:2] or part.lanes]
    return [pair for pairs in (first, third, others) for pair in sorted(pairs, key=lambda pair: -pair[0].seconds)]


def owner(file: Path, parts: Sequence[Part] = PARTS) -> Part:
    """Return the part that names `file` by the longest path. ValueError where none does, or two by the same one."""
    place = f"{file.relative_to(TESTS)}/"  # as text, because each file is compared with all paths of all parts
    named = [(len(path), part) for part in parts for path in part.paths if place.startswith(f"{path}/")]
    longest = [part for length, part in named if length == max(length for length, _ in named)]
    if len(longest) != 1:
        raise ValueError(f"{file} is named by {[part.name for part in longest] or 'no part'}")
    return longest[0]
