"""The kernel's interfaces that Python does not wrap, one subject a module."""
