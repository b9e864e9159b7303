"""The preload library, in C: large allocations of a program become memory that can be taken from it and given back.

`lookup.c` says how programs come to it, `memory.c` and `ranges.c` what it answers them, `owners.c` what it has to
imitate, `control.h` how the node's CUDA helper talks to it. It depends on libc alone, and on an old one.
"""
