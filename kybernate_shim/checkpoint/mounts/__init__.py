"""Mounts at a checkpoint and at a restore: who restores each one, and whether the new container offers it.

CRIU makes the mounts of a restored container exactly as they were dumped. The content of *private* ones (tmpfs,
/dev/pts, …) is in the image. *External* ones are the host's: the dump gives each a key, and the restore must offer
something under it. The runtime does so for what config.json lists: bind mounts, masked paths, devices. What a hook
mounted into the container, config.json does not list: that is for us to declare, at both ends.
A mount that is only in the new config.json would be missing in the restored container silently, so it is refused.
Sources: criu(8), --external and --skip-mnt; criu.org, "External bind mounts".
"""
