"""The data plane in a child: HAProxy passes requests of awake models by itself, and all others to the embedded plane.

`generated` writes its configuration, `runtime_api` talks to it, `child` starts, watches and hands over its process, and
`plane` switches models between their own backend and the activator.
"""
