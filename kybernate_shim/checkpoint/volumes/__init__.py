"""Volumes that live and die with their pod: their content travels in the image, unlike that of all other volumes.

A pod's emptyDir volumes and its /dev/shm are bind mounts of the node's to CRIU, which dumps nothing of them; a new pod
has empty ones. So what they have while the container is frozen is written next to CRIU's files, and is in the new pod's
volumes before CRIU opens anything. ConfigMaps, Secrets, tokens and the like are not taken: the new pod has its own, and
files of those that are open are opened there, with the content that they have now.
"""
