"""Checkpoints and restores: the order of their steps, the image's layout and manifest, CRIU's options and logs."""
