"""Control groups of both versions."""
