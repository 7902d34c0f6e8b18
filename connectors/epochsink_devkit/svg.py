"""Draw text, lines, boxes and curves as SVG, one call each, in the one style of this project's pictures.

Colours are classes: they follow the reader's light or dark setting. No text is smaller than 13 px.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Final

WIDTH: Final = 820
"""The width of a picture in px: that of a column of text, so that it is hardly made smaller."""
LIGHT: Final = {
    "back": "#ffffff",
    "text": "#1f2328",
    "weak": "#59636e",
    "faint": "#d0d7de",
    "blue": "#0969da",
    "violet": "#8250df",
    "grey": "#6e7781",
    "green": "#1a7f37",
    "red": "#cf222e",
    "amber": "#9a6700",
}
DARK: Final = {
    "back": "#0d1117",
    "text": "#e6edf3",
    "weak": "#9198a1",
    "faint": "#30363d",
    "blue": "#4493f8",
    "violet": "#ab7df8",
    "grey": "#8b949e",
    "green": "#3fb950",
    "red": "#f85149",
    "amber": "#d29922",
}
COLOURS: Final = ("blue", "violet", "green", "amber", "red", "grey")
"""The classes for things that are told apart. A box is filled with its colour; a line or curve has it."""


def _variables(colours: dict[str, str]) -> str:
    return ":root{" + ";".join(f"--{name}:{value}" for name, value in colours.items()) + "}"


STYLE: Final = "\n".join(
    (
        _variables(LIGHT),
        "@media(prefers-color-scheme:dark){" + _variables(DARK) + "}",
        "text{fill:var(--text);font:14px system-ui,sans-serif}text.title{font-size:18px;font-weight:600}",
        "text.head{font-size:15px;font-weight:600}text.small{font-size:13px}text.weak{fill:var(--weak)}",
        "rect.back{fill:var(--back)}.grid{stroke:var(--faint)}.ink{stroke:var(--text);fill:none}.thick{stroke-width:2}",
        ".dashed{stroke-dasharray:5 4;stroke-width:1.5}rect.part{opacity:.3}",
        *(
            f"rect.{name},circle.{name},text.{name}{{fill:var(--{name})}}"
            f"line.{name},polyline.{name}{{stroke:var(--{name})}}"
            for name in COLOURS
        ),
    )
)


class Svg:
    """A drawing of a ``width``, which grows downwards. Colours and sizes are classes of `STYLE`."""

    def __init__(self, width: int = WIDTH) -> None:
        self.width = width
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, **attributes: object) -> None:
        """Write a text, whose baseline begins there."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{_listed(attributes)}>{escape(text)}</text>')

    def paragraph(self, x: float, y: float, text: str, **attributes: object) -> float:
        """Write a text in as many lines as the width takes; return the next line's ``y``."""
        line = ""
        for word in text.split():
            if line and x + letters(f"{line} {word}") > self.width - x:
                self.text(x, y, line, **attributes)
                line, y = "", y + 20
            line = f"{line} {word}".strip()
        self.text(x, y, line, **attributes)
        return y + 20

    def line(self, x1: float, y1: float, x2: float, y2: float, **attributes: object) -> None:
        """Draw a line."""
        self._parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"{_listed(attributes)}/>')

    def box(self, x: float, y: float, width: float, height: float, title: str = "", **attributes: object) -> None:
        """Fill a box; its title shows under the pointer."""
        tooltip = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}"{_listed(attributes)}>{tooltip}</rect>'
        )

    def dot(self, x: float, y: float, title: str = "", **attributes: object) -> None:
        """Fill a dot; its title shows under the pointer."""
        tooltip = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="5"{_listed(attributes)}>{tooltip}</circle>')

    def curve(self, points: Iterable[tuple[float, float]], **attributes: object) -> None:
        """Draw lines from point to point."""
        listed = " ".join(f"{x:g},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{listed}" fill="none"{_listed(attributes)}/>')

    def legend(self, x: float, y: float, items: Iterable[tuple[str, str]]) -> float:
        """Draw each class and its text, in as many lines as the width takes; return the next line's ``y``.

        A class is shown by a box, and one of a line (``ink``) by a line.
        """
        left = x
        for class_, text in items:
            width = 18 + letters(text) + 18
            if x + width > self.width and x > left:
                x, y = left, y + 20
            if "ink" in class_.split():
                self.line(x, y - 4, x + 12, y - 4, class_=class_)
            else:
                self.box(x, y - 10, 12, 12, class_=class_)
            self.text(x + 18, y, text)
            x += width
        return y + 20

    def document(self, height: float, label: str = "") -> str:
        """Return the drawing; ``label`` says in words what it shows, for readers who cannot see it."""
        read = f'role="img" aria-label="{escape(label, quote=True)}" ' if label else ""
        return (
            f'<svg {read}xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height:g}">'
            f'<style>{STYLE}</style><rect width="100%" height="100%" class="back"/>{"".join(self._parts)}</svg>\n'
        )


def letters(text: str, size: float = 14) -> float:
    """Return about how wide a text is: wide rather than narrow, so that nothing is cut."""
    narrow = len(re.findall(r"[ijltf.,:;'|()\- ]", text))
    return size * (0.62 * (len(text) - narrow) + 0.36 * narrow)


def shortened(text: str, width: float) -> str:
    """Return a text, without its end if it is wider than that."""
    if letters(text) <= width:
        return text
    while text and letters(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."


def _listed(attributes: dict[str, object]) -> str:
    # class is a word of Python's, and names of SVG have a dash
    return "".join(f' {name.rstrip("_").replace("_", "-")}="{value}"' for name, value in attributes.items())
