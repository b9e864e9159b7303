"""Messages on the wire between containerd and the shim, generated from proto/shim."""

from kybernate_shim.imports import postpone

# protobuf imports its messages in Python in any case, with a dozen modules, and those in C suffice.
postpone("google.protobuf.internal.python_message")
