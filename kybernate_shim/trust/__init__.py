"""Who may do what: requesters and their rights, places that only root can write, keys, process credentials, audit."""
