"""The process that moves the VRAM bytes of one operation, between processes, the arena and files of an image.

CRIU moves pages in one thread; here several threads copy pieces of the regions in parallel, so that only a small rest
is left for CRIU: `save` and `drop` before a dump, `prefetch` and `load` at a restore, `put_back` where the process
lives on. The caller must keep the pids valid (as their parent, or by holding the processes stopped), and no process may
write to the regions meanwhile: memory that the program itself touches must not be among them.
"""
