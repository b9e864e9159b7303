"""Overlay mounts, also of images with so many layers that mount(2) cannot take their names.

mount(2) copies at most one page of options and silently cuts off the rest. Three ways, in this order: the options as
they are; lower directories relative to their common parent; one call per layer, which Linux 6.8 offers.
Sources: mount(2); the kernel's "Overlay Filesystem"; fsopen(2).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from kybernate_shim.linux import libc
from kybernate_shim.linux.mount import syscalls

ATTRIBUTES = {
    syscalls.MS_RDONLY: syscalls.MOUNT_ATTR_RDONLY,
    syscalls.MS_NOSUID: syscalls.MOUNT_ATTR_NOSUID,
    syscalls.MS_NODEV: syscalls.MOUNT_ATTR_NODEV,
    syscalls.MS_NOEXEC: syscalls.MOUNT_ATTR_NOEXEC,
    syscalls.MS_NOATIME: syscalls.MOUNT_ATTR_NOATIME,
    syscalls.MS_STRICTATIME: syscalls.MOUNT_ATTR_STRICTATIME,
    syscalls.MS_NODIRATIME: syscalls.MOUNT_ATTR_NODIRATIME,
}


def mount_overlay(source: str, target: str, flags: int, options: Sequence[str]) -> None:
    """Mount an overlay with `options` of any length at the absolute path `target`. Raises OSError."""
    if fits(options):
        syscalls.mount(source, target, "overlay", flags, ",".join(options))
        return
    parent, short = relative(options)
    if fits(short):
        in_directory(parent, lambda: syscalls.mount(source, target, "overlay", flags, ",".join(short)))
    else:
        in_directory(parent, lambda: _mount_by_layer(source, target, flags, short))


def fits(options: Sequence[str]) -> bool:
    """Return whether mount(2) accepts these options: at most a page, including the NUL at the end."""
    return len(os.fsencode(",".join(options))) < os.sysconf("SC_PAGE_SIZE")


def relative(options: Sequence[str]) -> tuple[str, list[str]]:
    """Return a directory, and the options with the lower directories named relative to it.

    Without a common parent, or with lower directories that are relative already, the names stay as they are.
    """
    layers = lower_directories(options)
    if not layers or not all(layer.startswith("/") for layer in layers):
        return ".", list(options)
    parent = os.path.commonpath([os.path.dirname(layer.rstrip("/")) for layer in layers])  # noqa: PTH120
    names = [os.path.relpath(layer, parent) for layer in layers]
    return unescaped(parent), with_lower_directories(options, names)


def lower_directories(options: Sequence[str]) -> list[str]:
    """Return the layers of the option `lowerdir`, topmost first, with their backslash escapes."""
    for option in options:
        if option.startswith("lowerdir="):
            return _split(option.removeprefix("lowerdir="))
    return []


def unescaped(layer: str) -> str:
    """Return the path of a layer that the option `lowerdir` names."""
    return layer.replace("\\:", ":").replace("\\\\", "\\")


def with_lower_directories(options: Sequence[str], layers: Sequence[str]) -> list[str]:
    """Return the options with other layers."""
    return ["lowerdir=" + ":".join(layers) if option.startswith("lowerdir=") else option for option in options]


def in_directory(directory: str, work: Callable[[], None]) -> None:
    """Run `work` in a thread that has its own working directory. The mounts stay those of the process."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            libc.unshare(libc.CLONE_FS)
            os.chdir(directory)
            work()
        except BaseException as error:  # noqa: BLE001  # it is raised again below, in the caller's thread
            failures.append(error)

    thread = threading.Thread(target=run, name="mount")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def _mount_by_layer(source: str, target: str, flags: int, options: Sequence[str]) -> None:
    context = syscalls.fsopen("overlay")
    try:
        try:
            _configure(context, source, flags, options)
            mount = syscalls.fsmount(context, attributes=_attributes(flags))
        except OSError as error:
            raise _explained(error, context) from None
        try:
            syscalls.move_mount(mount, "", syscalls.AT_FDCWD, target, syscalls.MOVE_MOUNT_F_EMPTY_PATH)
        finally:
            os.close(mount)
    finally:
        os.close(context)


def _configure(context: int, source: str, flags: int, options: Sequence[str]) -> None:
    syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, "source", source)
    if flags & syscalls.MS_RDONLY:
        syscalls.fsconfig(context, syscalls.FSCONFIG_SET_FLAG, "ro")
    for option in options:
        key, equals, value = option.partition("=")
        if key == "lowerdir":
            for layer in _split(value):
                syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, "lowerdir+", unescaped(layer))
        elif equals:
            syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, key, value)
        else:
            syscalls.fsconfig(context, syscalls.FSCONFIG_SET_FLAG, key)
    syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE)


def _explained(error: OSError, context: int) -> OSError:
    """Add the kernel's own words, which it leaves in the context, to `error`."""
    words = []
    try:
        while message := os.read(context, 4096):
            words.append(message.decode(errors="replace").strip())
    except OSError:
        pass  # ENODATA: that was the last one
    return OSError(error.errno, "; ".join([error.strerror or "", *words]), error.filename)


def _attributes(flags: int) -> int:
    return sum(attribute for flag, attribute in ATTRIBUTES.items() if flags & flag)


def _split(value: str) -> list[str]:
    """Split at colons that no backslash escapes."""
    layers, layer, escaped = [], "", False
    for character in value:
        if character == ":" and not escaped:
            layers.append(layer)
            layer = ""
        else:
            layer += character
        escaped = character == "\\" and not escaped
    return [*layers, layer]
