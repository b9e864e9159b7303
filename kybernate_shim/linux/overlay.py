"""Overlay mounts, also of images with so many layers that mount(2) cannot take their names.

mount(2) copies at most one page of options and cuts the rest off without a word. Three ways, in this order: the options
as they are; lower directories relative to their common parent; one call per layer, which Linux 6.8 offers.
Sources: mount(2); the kernel's "Overlay Filesystem"; fsopen(2).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from kybernate_shim.linux import libc

ATTRIBUTES = {
    libc.MS_RDONLY: libc.MOUNT_ATTR_RDONLY,
    libc.MS_NOSUID: libc.MOUNT_ATTR_NOSUID,
    libc.MS_NODEV: libc.MOUNT_ATTR_NODEV,
    libc.MS_NOEXEC: libc.MOUNT_ATTR_NOEXEC,
    libc.MS_NOATIME: libc.MOUNT_ATTR_NOATIME,
    libc.MS_STRICTATIME: libc.MOUNT_ATTR_STRICTATIME,
    libc.MS_NODIRATIME: libc.MOUNT_ATTR_NODIRATIME,
}


def mount_overlay(source: str, target: str, flags: int, options: Sequence[str]) -> None:
    """Mount an overlay with `options` of any length at the absolute path `target`. Raises OSError."""
    if fits(options):
        libc.mount(source, target, "overlay", flags, ",".join(options))
        return
    parent, short = relative(options)
    if fits(short):
        in_directory(parent, lambda: libc.mount(source, target, "overlay", flags, ",".join(short)))
    else:
        in_directory(parent, lambda: _mount_by_layer(source, target, flags, short))


def fits(options: Sequence[str]) -> bool:
    """Tell whether mount(2) takes these options: a page, less the NUL at its end."""
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
    return parent.replace("\\:", ":").replace("\\\\", "\\"), with_lower_directories(options, names)


def lower_directories(options: Sequence[str]) -> list[str]:
    """Return the layers of the option `lowerdir`, topmost first, with their backslash escapes."""
    for option in options:
        if option.startswith("lowerdir="):
            return _split(option.removeprefix("lowerdir="))
    return []


def with_lower_directories(options: Sequence[str], layers: Sequence[str]) -> list[str]:
    """Return the options with other layers."""
    return ["lowerdir=" + ":".join(layers) if option.startswith("lowerdir=") else option for option in options]


def in_directory(directory: str, work: Callable[[], None]) -> None:
    """Run `work` in a thread that has a working directory of its own; mounts stay those of the process."""
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
    context = libc.fsopen("overlay")
    try:
        try:
            _configure(context, source, flags, options)
            mount = libc.fsmount(context, attributes=_attributes(flags))
        except OSError as error:
            raise _explained(error, context) from None
        try:
            libc.move_mount(mount, "", libc.AT_FDCWD, target, libc.MOVE_MOUNT_F_EMPTY_PATH)
        finally:
            os.close(mount)
    finally:
        os.close(context)


def _configure(context: int, source: str, flags: int, options: Sequence[str]) -> None:
    libc.fsconfig(context, libc.FSCONFIG_SET_STRING, "source", source)
    if flags & libc.MS_RDONLY:
        libc.fsconfig(context, libc.FSCONFIG_SET_FLAG, "ro")
    for option in options:
        key, equals, value = option.partition("=")
        if key == "lowerdir":
            for layer in _split(value):
                plain = layer.replace("\\:", ":").replace("\\\\", "\\")
                libc.fsconfig(context, libc.FSCONFIG_SET_STRING, "lowerdir+", plain)
        elif equals:
            libc.fsconfig(context, libc.FSCONFIG_SET_STRING, key, value)
        else:
            libc.fsconfig(context, libc.FSCONFIG_SET_FLAG, key)
    libc.fsconfig(context, libc.FSCONFIG_CMD_CREATE)


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
