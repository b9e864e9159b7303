"""Volumes that live and die with their pod: their content travels in the image, unlike that of all other volumes.

To CRIU, a pod's emptyDir volumes and its /dev/shm are bind mounts from the node, of which it dumps nothing; those of a
new pod are empty. So their content is written next to CRIU's files while the container is frozen, and put into the new
pod's volumes before CRIU opens anything. ConfigMaps, Secrets, tokens and the like are not taken: the new pod has its
own, and files of them that were open are opened there, with the content that they have by then.
"""
