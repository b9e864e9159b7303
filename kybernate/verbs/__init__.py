"""What can be asked for: a module for each verb, for the agent's operations and for commands without an agent."""
