"""`kybernate up`: one file for one machine. Models with images or commands, behind one address, asleep until asked.

`models_file` reads the file, `lifecycle` decides what a model needs next, `keeper` does it with `probing`, `pods` makes
containers by containerd's CRI, in a `network` of their own where that is wanted, `room` says who leaves a GPU for whom,
`source` is what the proxy sees of all that, `control` what people ask. `program` puts them together, `background`
starts it as a service. `importing` and `ollama` write the file from another program's. What runs is found again by
labels of pods: there is no state of its own that could be wrong.
"""
