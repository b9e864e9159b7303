"""The arbiter of a node: one loop that owns the state of its seats, and acts by the agent's operations."""
