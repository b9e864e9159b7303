"""Who calls the agent, and what a caller may do: sockets, peer credentials, certificates, roles, the audit log."""
