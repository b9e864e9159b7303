"""containerd's Task service: containers, their processes, life cycle, events, stdio."""
