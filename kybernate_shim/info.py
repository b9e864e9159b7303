"""`-info`: what containerd 2.x asks a shim binary about itself and its OCI runtime."""

from __future__ import annotations

import os
import subprocess
import sys

from kybernate_shim import __version__

FEATURES_SECONDS = 10


def info() -> int:
    """Print a serialised RuntimeInfo: our name and version, the options that came on stdin, the runtime's features."""
    from google.protobuf.any_pb2 import Any

    from kybernate_shim.config import Config, ConfigInvalid
    from kybernate_shim.messages import types_pb2 as wire
    from kybernate_shim.messages.any import OCI_FEATURES
    from kybernate_shim.oci.options import UnsupportedOptions, decode_options
    from kybernate_shim.oci.select import RuntimeMissing, choose_runtime
    from kybernate_shim.oci.spec import Spec

    answer = wire.RuntimeInfo(name="io.containerd.kybernate.v1")
    answer.version.version = __version__
    given = sys.stdin.buffer.read() if sys.stdin is not None and not sys.stdin.isatty() else b""
    options = Any.FromString(given)
    if options.type_url:
        answer.options.CopyFrom(options)
    try:
        runtime = choose_runtime(os.environ, decode_options(options), Config.load(), Spec({}))
        features = subprocess.run([runtime, "features"], capture_output=True, check=True, timeout=FEATURES_SECONDS)
    except (ConfigInvalid, UnsupportedOptions, RuntimeMissing, OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"containerd-shim-kybernate-v1: features of the OCI runtime are unknown: {error}\n")
    else:
        answer.features.type_url, answer.features.value = OCI_FEATURES, features.stdout
    sys.stdout.buffer.write(answer.SerializeToString())
    return 0
