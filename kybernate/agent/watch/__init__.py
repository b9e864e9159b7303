"""What the agent knows now, what has changed, and who follows it."""
