"""`-info`: what containerd 2.x asks a shim binary about itself and its OCI runtime."""

from __future__ import annotations

import os
import subprocess
import sys

from kybernate_shim import __version__


def info() -> int:
    """Print a serialised RuntimeInfo: our name and version, the options that came on stdin, the runtime's features."""
    from google.protobuf.message import DecodeError

    from kybernate_shim.config import Config, ConfigInvalid
    from kybernate_shim.errors import Invalid, Missing
    from kybernate_shim.messages import types_pb2 as wire
    from kybernate_shim.messages.any import OCI_FEATURES
    from kybernate_shim.oci.options import decode_options
    from kybernate_shim.oci.select import choose_runtime
    from kybernate_shim.oci.spec import Spec

    answer = wire.RuntimeInfo(name="io.containerd.kybernate.v1")
    answer.version.version = __version__
    if given := sys.stdin.buffer.read() if sys.stdin is not None and not sys.stdin.isatty() else b"":
        try:
            answer.options.ParseFromString(given)
        except DecodeError as error:
            sys.stderr.write(f"containerd-shim-kybernate-v1: options on stdin cannot be decoded: {error}\n")
            return 1
    try:
        config = Config.load()
        runtime = choose_runtime(os.environ, decode_options(answer.options), config, Spec({}))
        deadline = config.deadlines.query or None
        features = subprocess.run([runtime, "features"], capture_output=True, check=True, timeout=deadline)
    except (ConfigInvalid, Invalid, Missing, OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"containerd-shim-kybernate-v1: features of the OCI runtime are unknown: {error}\n")
    else:
        answer.features.type_url, answer.features.value = OCI_FEATURES, features.stdout
    sys.stdout.buffer.write(answer.SerializeToString())
    return 0
