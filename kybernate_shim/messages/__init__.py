"""Messages on the wire between containerd and the shim, generated from proto/shim."""
