"""The environment in which NCCL's communicators survive a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

# What was measured to survive: two ranks, shared-memory transport without the driver's own handles.
# NVLS would make multicast objects, on which the driver's checkpoint hangs. The last one is for the store where
# PyTorch's ranks meet: its libuv opens an io_uring whatever UV_USE_IO_URING says.
NCCL_SAFE: Mapping[str, str] = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "USE_LIBUV": "0",
}
NCCL_SAFE_ANNOTATION = "kybernate.io/nccl-safe"
