"""What the policy of the tiers would do on a trace of uses: the same decisions, under a clock that jumps.

Only `kybernate store simulate` uses it.
"""
