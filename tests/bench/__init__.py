"""Measures this shim against containerd's own, on the same work in the same run: `make bench`."""
