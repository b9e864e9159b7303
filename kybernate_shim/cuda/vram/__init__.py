"""The data path for VRAM bytes: from the process that holds them after a CUDA checkpoint to files, and back.

CRIU moves pages in one thread; here several threads copy pieces of the regions side by side, so that CRIU is left with
the small rest. All of it is synchronous and for a worker process: `save` and `drop` before a dump, `prefetch` and
`load` at a restore, `put_back` where the process lives on. The bytes pass through mapped buffers of a few MiB a thread
and never become Python objects; every call that moves or reads them leaves the interpreter lock.

The caller sees to it that the pids stay what they are (as their parent, or by holding them stopped) and that nobody
writes to the regions meanwhile: memory that the program itself touches must not be among them.
"""
