"""Attacks by a tenant's pod or container, and what must be seen instead. They run in the lab, as system tests do."""
