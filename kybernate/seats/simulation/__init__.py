"""What the arbiter would do on a trace of requests: the same decisions, under a clock that jumps.

Only the command uses it.
"""
