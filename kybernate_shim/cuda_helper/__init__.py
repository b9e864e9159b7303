"""The node's CUDA helper, a separate process: workers, the arena, the pool of memory for images. Loads no libcuda."""
