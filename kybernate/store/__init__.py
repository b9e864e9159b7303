"""The checkpoint store: images in tiers, from the node's memory to an object store, and their movement between them."""
