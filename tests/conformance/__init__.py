"""Kubernetes' own end-to-end tests, run by the stock handler and by ours in the same cluster of the lab, and compared.

`make conformance` runs them. They are no part of `make test`: they take more than an hour.
"""
