"""The report on a node with everything that Kybernate has there: what `kybernate doctor` prints.

Each module looks at one part. What is there is gathered at the edge; what it means is a pure function of that.
"""
