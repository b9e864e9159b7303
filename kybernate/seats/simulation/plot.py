"""A line chart as SVG: goodput over the number of models on one GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 640, 360, 48
COLOURS = ("#b34700", "#5b5b9a", "#00705a", "#7a7a00")
Points = Sequence[tuple[float, float]]


def goodput_chart(lines: Mapping[str, Points], wanted: float) -> str:
    """Return the chart. Each line has (models, share of good answers); `wanted` is drawn as a dashed line."""
    most = max((x for points in lines.values() for x, _ in points), default=1.0)

    def place(x: float, y: float) -> str:
        across = MARGIN + x / most * (WIDTH - 2 * MARGIN)
        return f"{across:.1f},{HEIGHT - MARGIN - y * (HEIGHT - 2 * MARGIN):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _line(place(0, 0), place(most, 0), "#444444"),
        _line(place(0, 0), place(0, 1), "#444444"),
        _line(place(0, wanted), place(most, wanted), "#999999", ' stroke-dasharray="4 4"'),
    ]
    for share in (0.0, 0.5, wanted, 1.0):
        parts.append(_text(place(0, share), f"{share:.0%}", "end", -6))
    for step in range(5):
        parts.append(_text(place(most * step / 4, 0), f"{most * step / 4:.0f}", "middle", 0, 18))
    parts.append(_text(place(most / 2, 0), "models on one GPU", "middle", 0, 36))
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        joined = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(place(most, 1), name, "end", 0, 14 + 16 * number, colour))
    return "\n".join([*parts, "</svg>", ""])


def _line(start: str, end: str, colour: str, more: str = "") -> str:
    (x1, y1), (x2, y2) = start.split(","), end.split(",")
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"{more}/>'


def _text(at: str, text: str, anchor: str, right: int, down: int = 4, colour: str = "#222222") -> str:
    x, y = (float(one) for one in at.split(","))
    return f'<text x="{x + right:.1f}" y="{y + down:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
