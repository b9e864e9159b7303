"""Wake on request: an address that always answers, for models of which more are kept than fit on the GPUs.

`settings` says what there is, `routing` which model a request is for, `holding` who waits and when a model wakes or is
suspended; all three are pure. `engine` is the one writer of what is held. `embedded` is the data plane in this process,
`haproxy` the one in a child, whose activator is the embedded one.
"""
