"""VRAM at the speed of the card's link: a program's memory is moved to and from pinned host memory of the node.

control    asks the preload library inside a program (kybernate_shim/cuda/preload) for its memory, and to give it up
memory     the node's host memory for that: a file of a fixed size, and who has which part of it
transfer   the only module here that loads libcuda: maps a program's memory and copies
worker     the process that it runs in
saved      what it has of a process as a file of a checkpoint image, and back
keeper     the order of lock, stop, unlock, move and lock, and the way back when one of them fails
"""
