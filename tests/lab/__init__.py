"""The lab: a complete throw-away node with real containerd, runc and CRIU, for tests, demos and benchmarks.

`tests/lab/run` is the entry point. What runs on the machine itself (`cli` and all it needs) and what runs as pid 1 of
the node (`init`, `node`) uses nothing but the standard library, because there is no virtual environment yet.
"""
