"""How sizes, shares and durations are written in the reasons of actions."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """Return 17.0 GiB, 512 MiB, 80 B."""
    value = float(count)
    for unit in UNITS[:-1]:
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {UNITS[-1]}"


def duration(seconds: float) -> str:
    """Return 3 days, 5 h, 12 min, 40 s: the largest unit of which there are two."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def share(part: float) -> str:
    """Return 85 %."""
    return f"{part:.0%}".replace("%", " %")
