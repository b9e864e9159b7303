"""Messages that only tests exchange: those of CRI, whose client is the kubelet, generated from proto/tests."""
