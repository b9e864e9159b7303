"""A Kubernetes cluster in the lab: a control plane, and one to three nodes, each with namespaces of its own.

`certificates` makes the identities, `machine` a node's namespaces, `components` knows the programs and their flags,
`nodes` a node's programs, `cluster` brings all of it up. It runs in the lab's node, with the project's Python.
"""
