"""The zoo: each program, what it goes through, and what is expected of it. Plain data; loads nothing of CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

WAYS = ("plain", "arena")
# "suspend" is followed by a resume; "checkpoint" leaves the container running; each has to compute on afterwards.
WORKS = (
    "start",
    "suspend-1",
    "suspend-2",
    "suspend-3",
    "checkpoint",
    "checkpoint-exit",
    "restore",
    "suspend-restored",
    "checkpoint-exit-2",
    "restore-2",
)
REFUSED = ("start", "suspend-refused", "checkpoint-refused", "goes-on")
FIXED_SUMS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # or cuBLAS adds up in another order from time to time
LOOPBACK = ("--cap-add", "CAP_NET_ADMIN")  # a container of ctr has a network namespace of its own, where `lo` is off


@dataclass(frozen=True)
class Entry:
    """One program. `work` names its function; `variables` and `flags` are for its container.

    `refused` is a word of the reason that pre-flight gives; "" where the program must survive everything. `lines` is
    how many of its processes print steps, `prefix` what the first of them is told to begin lines with, `gpus` how many
    the machine must have, `mib` the size of what it keeps.
    `pretended`: the pretended driver has what it calls. `seconds` is its deadline, for each way.
    """

    name: str
    work: str
    about: str
    variables: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    checkpoint: tuple[str, ...] = ()
    refused: str = ""
    ways: tuple[str, ...] = WAYS
    lines: int = 1
    prefix: str = ""
    gpus: int = 1
    mib: int = 256
    pretended: bool = False
    seconds: int = 120

    @property
    def steps(self) -> tuple[str, ...]:
        return REFUSED if self.refused else WORKS


def _allocator(name: str, settings: str, about: str, **more: str) -> Entry:
    variables = {**FIXED_SUMS, **({"PYTORCH_CUDA_ALLOC_CONF": settings} if settings else {}), **more}
    return Entry(f"allocator-{name}", "allocator", f"PyTorch's allocator: {about}", variables)


def _loader(method: str, *, persistent: bool) -> Entry:
    name = f"loader-{method}{'-persistent' if persistent else ''}"
    kind = "persistent workers" if persistent else "new workers each time"
    variables = {**FIXED_SUMS, "ZOO_WORKERS": method, "ZOO_PERSISTENT": "1" if persistent else ""}
    about = f"PyTorch's DataLoader, two workers by {method}, {kind}, pin_memory"
    return Entry(name, "loader", about, variables, seconds=180)


ZOO: tuple[Entry, ...] = (
    Entry(
        "copies",
        "copies",
        "copies in all directions, 4 B to 1 GiB: pinned, registered, pageable memory; side streams",
        mib=1024,
        pretended=True,
    ),
    Entry("memset", "memset", "memset of 8, 16 and 32 bits, in rows, on streams", pretended=True),
    Entry("pointers", "pointers", "cuPointerGetAttribute(s) and cuMemGetAddressRange without a pause"),
    Entry("graphs", "graphs", "a CUDA graph with memcpy and memset nodes"),
    Entry("events", "events", "events between two streams, and their timing"),
    Entry("kernels", "kernels", "a module from PTX by the driver API, launched without a pause", pretended=True),
    Entry("virtual", "virtual", "cuMemCreate, map, unmap and release without a pause", pretended=True),
    Entry("pools", "pools", "cuMemAllocAsync and cuMemFreeAsync on two streams"),
    Entry("threads", "threads", "four threads that allocate all the time", pretended=True),
    Entry("nvml", "nvml", "a thread that polls NVML as pynvml does"),
    Entry("nvml-c", "nvml_in_c", "a thread of C that polls NVML"),
    Entry(
        "torch-watched", "torch_watched", "a thread that asks PyTorch for memory and load without a pause", FIXED_SUMS
    ),
    Entry(
        "children",
        "children",
        "a parent with CUDA and two children with CUDA",
        lines=3,
        prefix="2: ",
        mib=128,
        pretended=True,
    ),
    Entry("bindings", "bindings", "cuda-bindings: NVRTC, module, launches, copies, as cupy and numba do"),
    _allocator("native", "", "native"),
    _allocator("async", "backend:cudaMallocAsync", "cudaMallocAsync", ZOO_BACKEND="cudaMallocAsync"),
    _allocator("expandable", "expandable_segments:True", "expandable segments"),
    _allocator("split", "max_split_size_mb:32,garbage_collection_threshold:0.6", "max_split_size_mb, collection"),
    _allocator("rounding", "roundup_power2_divisions:4", "sizes rounded up"),
    _allocator("registered", "pinned_use_cuda_host_register:True,pinned_num_register_threads:4", "cudaHostRegister"),
    _allocator("uncached", "", "no cache", PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
    *(_loader(method, persistent=kept) for method in ("fork", "forkserver", "spawn") for kept in (False, True)),
    Entry("amp", "amp", "training with autocast, GradScaler and a fused optimizer", FIXED_SUMS),
    Entry("libraries", "libraries", "cuDNN, cuBLAS, cuFFT, cuSOLVER", FIXED_SUMS),
    Entry("torch-graph", "torch_graph", "torch.cuda.CUDAGraph with copies from pinned memory", FIXED_SUMS),
    Entry("compile", "compiled", "torch.compile, where Triton can compile", FIXED_SUMS, seconds=240),
    Entry("generate", "generate", "a transformer that generates", FIXED_SUMS, mib=512, seconds=240),
    Entry(
        "http",
        "http",
        "a transformer behind a multithreaded HTTP server, and its four clients; no request may fail",
        FIXED_SUMS,
        LOOPBACK,
        ("--tcp", "established"),
        mib=512,
        seconds=240,
    ),
    Entry("managed", "managed", "cuMemAllocManaged", refused="managed memory", pretended=True),
    Entry(
        "imported",
        "imported",
        "cuMemImportFromShareableHandle; only the arena's library can tell",
        refused="memory imported from another process",
        ways=("arena",),
        pretended=True,
    ),
    Entry(
        "ipc",
        "ipc",
        "cuIpcOpenMemHandle in another process: without the arena nothing shows it, and it is lost (docs/gpus.md)",
        refused="memory imported from another process",
        ways=("arena",),
        lines=2,
        prefix="0: ",
    ),
    *(
        Entry(
            f"torch-shared-{way}",
            "torch_shared",
            "tensors of the GPU, shared by torch.multiprocessing",
            FIXED_SUMS,
            refused=reason,
            ways=(way,),
        )
        for way, reason in (("plain", "CUDA IPC"), ("arena", "memory imported from another process"))
    ),
    Entry(
        "nccl",
        "nccl",
        "two ranks of NCCL over peer memory",
        {"USE_LIBUV": "0", "NCCL_MAX_NCHANNELS": "2"},
        ("--device", "/dev/nvidia1", *LOOPBACK),
        refused="NCCL",
        lines=2,
        gpus=2,
    ),
)
NAMES = tuple(entry.name for entry in ZOO)
# Under which suspend and resume are repeated hundreds of times: different in what they have in progress.
CYCLED = ("copies", "graphs", "kernels", "threads", "allocator-expandable", "amp", "generate", "http")


class UnknownProgram(ValueError):
    """No program of the zoo has that name."""


def chosen(
    names: str, *, gpus: int = 1, pretended: bool = False, default: Iterable[str] = NAMES
) -> tuple[list[Entry], dict[str, str]]:
    """Return the programs that `names` lists, separated by commas ("" or "all": `default`), and why others are not run.

    Raises UnknownProgram.
    """
    wanted = list(default) if names in ("", "all") else names.split(",")
    if unknown := [name for name in wanted if name not in NAMES]:
        raise UnknownProgram(f"{', '.join(unknown)}: not among {', '.join(NAMES)}")
    left_out: dict[str, str] = {}
    for entry in ZOO:
        if entry.gpus > gpus:
            left_out[entry.name] = f"it needs {entry.gpus} GPUs, and there are {gpus}"
        elif pretended and not entry.pretended:
            left_out[entry.name] = "the pretended driver has not what it calls"
    found = [entry for entry in ZOO if entry.name in wanted and entry.name not in left_out]
    return found, {name: why for name, why in left_out.items() if name in wanted}


def smaller(entries: Sequence[Entry], mib: int) -> dict[str, int]:
    """Return what each program keeps where none may keep more than `mib`."""
    return {entry.name: min(entry.mib, mib) for entry in entries}
