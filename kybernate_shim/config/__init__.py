"""The shim's configuration: what other modules use of it."""

from kybernate_shim.config.declaring import LIVE, NODE
from kybernate_shim.config.reading import DEFAULT_PATH, ConfigInvalid
from kybernate_shim.config.settings import Config, Deadlines, GpuSettings

__all__ = [
    "DEFAULT_PATH",
    "LIVE",
    "NODE",
    "Config",
    "ConfigInvalid",
    "Deadlines",
    "GpuSettings",
]
