"""What the agent does in a cluster: events on pods, and what their annotations ask for."""
