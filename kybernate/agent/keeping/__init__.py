"""Keeps images where the policy wants them: what is there is gathered, decided upon, and submitted as operations."""
