"""The node's arena of pinned host memory, as far as several processes agree on it. Loads no CUDA.

control    asks the preload library inside a program (kybernate_shim/preload) for its memory, and to give it up
memory     the node's host memory for that: a file of a fixed size, and who has which part of it
banks      which part of it lies on which NUMA node
extents    parts and holes
records    the file next to the memory for each process: where its bytes are, and what they hash to
pieces     which parts of a process have changed since the arena had them last, and which are zeros
accounts   the pod or container that a part is charged to

The CUDA helper orders the steps (cuda_helper/arena_manager.py), one of its workers copies between GPUs and arena
(cuda_worker/arena_executor.py), the VRAM mover between arena and image (vram_mover/arena_files.py).
"""
