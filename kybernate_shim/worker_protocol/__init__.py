"""The protocol of all our worker processes: typed jobs, typed answers, the same frames.

The CUDA helper speaks it with its CUDA workers and holders, a daemon with its VRAM mover.

frames      messages from and to bytes, however the bytes arrive
messages    what is sent: a job, progress, an event, an answer, a failure, a cancellation
errors      what can go wrong, and how an exception of a worker is raised in its client
client      the side that has a worker: jobs in progress, deadlines, cancellation, the worker's end
server      the side of the worker
programs    how a worker is started, and that both sides are of one release
cuda_jobs, holder_jobs, mover_jobs
            the jobs of each kind of worker
"""

from kybernate_shim.imports import without

with without("typing_extensions"):  # takes as long to import as all of msgspec, and is not used
    import msgspec as msgspec
