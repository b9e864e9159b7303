"""Programs on PyTorch. Each runs on the CPU as well, for a rehearsal of its figures; torch is the machine's."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.gpu.zoo.figures import Impossible, Options, Round, require

MIB = 1 << 20
MOST_AT_ONCE = 4 << 20  # numbers that are added up together: in 64 bits they take a multiple of their size


def loaded() -> Any:
    """Return torch, set to give the same figures each time."""
    import torch  # takes seconds, and not every program needs it

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.manual_seed(1)
    return torch


def digest(tensor: Any) -> int:
    """Return a checksum of a tensor's bits that depends on their order, computed where the tensor is."""
    import torch

    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().contiguous().flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    total = 0
    for number, piece in enumerate(flat.view(kinds[flat.element_size()]).split(MOST_AT_ONCE)):
        places = torch.arange(1, piece.numel() + 1, dtype=torch.int64, device=piece.device) * 2654435761 + number
        total += int(((piece.to(torch.int64) + 3) * places).sum())
    return total % (1 << 64)


def _random(torch: Any, seed: int, size: int, device: str) -> Any:
    """Return bytes of that seed, as integers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), (1 << 31) - 1, (size // 4,), dtype=torch.int32, generator=generator).to(device)


def allocator(options: Options) -> Round:
    """Keep blocks, allocate and free others on two streams and in a thread, and copy through pinned memory."""
    torch = loaded()
    gpu = options.device == "cuda"
    wanted = os.environ.get("ZOO_BACKEND", "native")
    if gpu:
        require(torch.cuda.get_allocator_backend() == wanted, f"the allocator is {torch.cuda.get_allocator_backend()}")
    size = options.mib * MIB // 16
    kept = [_random(torch, number, size, options.device) for number in range(8)]
    side = torch.cuda.Stream() if gpu else None
    threading.Thread(target=_churn, args=(torch, options.device), daemon=True).start()

    def through_side(number: int) -> int:
        source = _random(torch, number, MIB, "cpu")
        source = source.pin_memory() if gpu else source
        if side is None:
            return digest(source.to(options.device) + 1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            moved = source.to(options.device, non_blocking=True)
            more = moved + 1
        torch.cuda.current_stream().wait_stream(side)
        more.record_stream(torch.cuda.current_stream())
        return digest(more)

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(24):
            length = (size // 64) * (1 + number * 7 % 40)
            scratch = torch.full((length // 4,), number, dtype=torch.int32, device=options.device)
            yield f"allocated {number}", digest(scratch)
            del scratch
            yield f"beside {number}", through_side(number)
            if (
                gpu and number % 6 == 5 and wanted != "cudaMallocAsync"
            ):  # see docs/gpus.md: the driver's checkpoint fails
                torch.cuda.empty_cache()
        for number, tensor in enumerate(kept):
            yield f"kept {number}", digest(tensor)

    return a_round


def _churn(torch: Any, device: str) -> None:
    numbers = random.Random(2)
    while True:
        length, value = numbers.choice((1 << 10, 1 << 18, 1 << 20, 5 << 20)), numbers.randrange(1 << 20)
        block = torch.full((length,), value, dtype=torch.int32, device=device)
        require(int(block[-1]) == value, "what the thread has filled")


def amp(options: Options) -> Round:
    """Train with autocast, a GradScaler and a fused AdamW; each round begins with the same weights."""
    torch = loaded()
    gpu = options.device == "cuda"
    width = 1024 if gpu else 64
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(16 * 16 * 16, width), torch.nn.LayerNorm(width), torch.nn.GELU(),
        torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, 10),
    ).to(options.device)  # fmt: skip
    beginning = {name: value.detach().clone() for name, value in model.state_dict().items()}
    half = torch.float16 if gpu else torch.bfloat16
    images = torch.rand(8, 32, 3, 16, 16, generator=torch.Generator().manual_seed(2)).to(options.device)
    labels = torch.randint(0, 10, (8, 32), generator=torch.Generator().manual_seed(3)).to(options.device)

    def a_round() -> Iterator[tuple[str, int]]:
        model.load_state_dict(beginning)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        scaler = torch.amp.GradScaler(options.device, enabled=gpu)
        for number in range(16):
            optimizer.zero_grad()
            with torch.autocast(options.device, dtype=half):
                loss = torch.nn.functional.cross_entropy(model(images[number % 8]), labels[number % 8])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            yield f"loss {number}", digest(loss)
        for name, value in model.named_parameters():
            yield name, digest(value)
        for number, state in enumerate(optimizer.state.values()):
            yield f"moment {number}", digest(state["exp_avg_sq"])

    return a_round


def libraries(options: Options) -> Round:
    """Call cuDNN, cuBLAS, cuFFT and cuSOLVER, or what stands for them on the CPU.

    Of what their rules leave open, such as the signs of eigenvectors, only what must hold is looked at.
    """
    torch = loaded()
    side = 256 if options.device == "cuda" else 48
    generator = torch.Generator().manual_seed(4)
    square = torch.rand(side, side, generator=generator).to(options.device) + torch.eye(side, device=options.device)
    images = torch.rand(8, 8, side, side, generator=generator).to(options.device)
    weights = torch.rand(16, 8, 3, 3, generator=generator).to(options.device).requires_grad_()
    symmetric = square @ square.T + side * torch.eye(side, device=options.device)

    def near(one: Any, other: Any, what: str) -> int:
        require(torch.allclose(one, other, rtol=1e-2, atol=1e-2), what)
        return 1

    def convolution() -> int:
        weights.grad = None
        out = torch.nn.functional.conv2d(images, weights, padding=1)
        out.sum().backward()
        return digest(out) ^ digest(weights.grad)

    def eigenvectors() -> int:
        values, vectors = torch.linalg.eigh(symmetric)
        return near(vectors @ torch.diag(values) @ vectors.T, symmetric, "eigh")

    def singular_values() -> int:
        left, values, right = torch.linalg.svd(square)
        return near(left @ torch.diag(values) @ right, square, "svd")

    work: dict[str, Callable[[], int]] = {
        "conv2d": convolution,
        "mm": lambda: digest(square @ square),
        "bmm": lambda: digest(images[0] @ images[1]),
        "half": lambda: digest(square.to(torch.bfloat16) @ square.to(torch.bfloat16)),
        "fft": lambda: digest(torch.fft.fft2(images[0])),
        "inverse fft": lambda: near(torch.fft.ifft2(torch.fft.fft2(images[0])).real, images[0], "ifft2"),
        "cholesky": lambda: digest(torch.linalg.cholesky(symmetric)),
        "solve": lambda: near(symmetric @ torch.linalg.solve(symmetric, square), square, "solve"),
        "eigh": eigenvectors,
        "svd": singular_values,
    }

    def a_round() -> Iterator[tuple[str, int]]:
        yield from ((name, one()) for name, one in work.items())

    return a_round


def torch_graph(options: Options) -> Round:
    """Replay a graph that copies from pinned memory, computes, and copies back; the input changes in between."""
    torch = loaded()
    gpu, count = options.device == "cuda", 1 << 20
    source, target = (torch.zeros(count, dtype=torch.int32) for _ in range(2))
    if gpu:
        source, target = source.pin_memory(), target.pin_memory()
    memory = torch.zeros(count, dtype=torch.int32, device=options.device)

    def work() -> None:
        memory.copy_(source, non_blocking=True)
        memory.mul_(3).add_(1)
        target.copy_(memory, non_blocking=True)

    replay: Callable[[], object] = work
    if gpu:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        replay = graph.replay

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(20):
            source.copy_(_random(torch, number, count * 4, "cpu"))
            replay()
            if gpu:
                torch.cuda.synchronize()
            yield f"replay {number}", digest(target) ^ digest(memory)

    return a_round


def compiled(options: Options) -> Round:
    """Run what torch.compile makes; where it cannot compile, say why."""
    torch = loaded()

    def work(left: Any, right: Any) -> Any:
        return torch.softmax(torch.sin(left) * right + left.square(), dim=1).sum(dim=0)

    fast = torch.compile(work)
    left, right = (_random(torch, seed, 4 * MIB, options.device).float().view(1024, -1) / (1 << 31) for seed in (1, 2))
    try:
        fast(left, right)
    except Exception as error:  # whatever its compilers lack: the message says
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise Impossible(f"torch.compile: {type(error).__name__}: {' / '.join(lines)[:300]}") from error

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(20):
            yield f"call {number}", digest(fast(left * (number + 1), right))

    return a_round


class Numbers:
    """A data set: item N is made of the number N, in a worker."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.rand(2048, generator=torch.Generator().manual_seed(index))


def loader(options: Options) -> Round:
    """Multiply what a DataLoader with two workers brings, which begin by ZOO_WORKERS after CUDA has begun."""
    torch = loaded()
    gpu = options.device == "cuda"
    weights = torch.rand(2048, 256, generator=torch.Generator().manual_seed(5)).to(options.device)
    kept = _random(torch, 6, options.mib * MIB // 4, options.device)
    batches = torch.utils.data.DataLoader(
        Numbers(),
        batch_size=4,
        num_workers=2,
        pin_memory=gpu,
        multiprocessing_context=os.environ["ZOO_WORKERS"],
        persistent_workers=bool(os.environ.get("ZOO_PERSISTENT")),
    )

    def a_round() -> Iterator[tuple[str, int]]:
        for number, batch in enumerate(batches):
            yield f"batch {number}", digest(batch.to(options.device, non_blocking=True) @ weights)
        yield "kept", digest(kept)

    return a_round
