"""Files of VRAM bytes, for every process that reads or writes some: direct I/O, threads, digests, prepared memory.

The bytes pass through mapped buffers of a few MiB a thread and never become Python objects; every call that moves or
reads them releases the interpreter lock.
"""
