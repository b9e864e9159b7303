"""The web page of a node: what is on it, what happens, and buttons for operators.

`view` has what a page shows, `known` folds a stream of changes into it, `source` is the interface behind which the
data comes from, `node` is that of a node's agent. `access` decides who may look and who may act. `app` answers HTTP.
The page runs as a program of its own, outside the agent: what reads requests from a network has no capabilities, and
the page can say that the agent is away.
"""
