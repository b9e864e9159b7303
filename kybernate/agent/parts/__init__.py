"""The agent's parts: each module connects the parts of one subject with what they need of the others."""
