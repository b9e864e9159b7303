"""A container's GPU state in a checkpoint, a restore, a suspend and a resume."""
