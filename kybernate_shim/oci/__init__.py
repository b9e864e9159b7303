"""OCI runtimes: which one runs a container, how it is called, and what it reads and writes in the bundle."""
