"""What is on the node: containers, GPUs, places for images, programs; looked at, and kept up to date by events."""
