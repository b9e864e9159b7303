"""Mounts: a container's root filesystem and what it is made of."""
