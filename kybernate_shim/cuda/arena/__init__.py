"""VRAM at the speed of the card's link: a program's memory is moved to and from pinned host memory of the node.

control    asks the preload library inside a program (kybernate_shim/cuda/preload) for its memory, and to give it up
memory     the node's host memory for that: a file of a fixed size, and who has which part of it (extents, notes)
pieces     which parts of a process have changed since the arena had them last, and which are zeros
hashing    tells that on the card, by hashing.cu, which kernel compiles
transfer   maps a program's memory and copies; with hashing and calls, all that loads libcuda here
moves      what the worker does with it to one process
saved      what it has of a process as a file of a checkpoint image, and back
keeper     the order of lock, stop, unlock, move and lock, and the way back when one of them fails
"""
