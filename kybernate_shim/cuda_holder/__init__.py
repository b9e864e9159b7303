"""The process that holds another process's threads for the arena, and outlives the CUDA helper."""
