"""One node's containerd and shims, as clients see them: what the command line, and later the node agent, is made of."""
