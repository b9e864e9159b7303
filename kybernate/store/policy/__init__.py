"""When images move between tiers, and when they end. Decisions alone: no clock, no disk, no network.

`decide(state, rules)` returns actions, which the agent carries out. `store.simulation` replays traces.
"""
