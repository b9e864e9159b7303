"""`kybernate up`: one file for one machine. Models with images or commands, behind one address, asleep until asked.

`models_file` reads the file, `lifecycle` decides what a model needs next, `pods` makes containers by containerd's CRI,
and `program` does it. What runs is found again by labels of pods: there is no state of its own that could be wrong.
"""
