"""Compares this checkout with another one on the same machine, in one run: `tests/gpu/arena_bench --against DIRECTORY`.

Each side is a process of its own with its own package, helper, native parts and preload library. The tests' code is
this checkout's for both, and talks to a side in JSON lines. Both keep their programs off the GPU while the other one is
measured.
"""
