"""How images move between tiers: in which order, how fast, from where, and what is never removed."""
