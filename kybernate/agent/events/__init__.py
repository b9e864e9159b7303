"""What happened on the node: kept for a day, and handed to watchers, hooks, containerd and the log."""
