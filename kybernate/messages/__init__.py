"""Messages of containerd's API and of CRI, with gRPC clients, generated from proto/node."""
