"""The catalogue of checkpoint images: an index of what lies on the nodes, made again from there on request."""
