"""What needs more than one node, and our handler as the default one."""
