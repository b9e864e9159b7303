"""Which tiers this node has, and what the registry knows of them."""
