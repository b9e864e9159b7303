"""Durable operations: in the journal before they begin, one at a time for a container, none lost in a crash."""
