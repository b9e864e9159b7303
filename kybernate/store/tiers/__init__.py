"""Where checkpoint images are kept: memory, disk, object store, another node. Each kind of place is one module."""
