"""Tests that run on the machine itself, as root, and start nodes of the lab: what only the machine can show."""
