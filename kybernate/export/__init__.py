"""Checkpoint images outside of a node: OCI image layouts, image registries, and archives that `checkpointctl` reads."""
