"""Images that agents of other nodes read: what is open for whom, and the bytes themselves."""
