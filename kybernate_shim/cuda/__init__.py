"""The CUDA driver's checkpoint calls for a container's processes.

libcuda lives in a helper process per node (`helper`), and there only in worker processes (`worker`): a crash or a hang
of the driver costs one of those. Shims ask the helper through `client`; `sequence` keeps the order and undoes it.
"""
