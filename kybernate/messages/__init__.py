"""Messages of containerd's API, with gRPC clients, generated from proto/node."""
