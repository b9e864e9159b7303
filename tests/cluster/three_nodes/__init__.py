"""What needs more than one node, in a cluster of three, with our handler as the default one."""
