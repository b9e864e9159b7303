"""The runtime plugin that containerd starts once per pod: containerd-shim-kybernate-v1."""

__version__ = "0.1.0"
