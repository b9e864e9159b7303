"""The process that holds the threads of another one for the arena, and outlives the CUDA helper."""
