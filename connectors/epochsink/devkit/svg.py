"""Draw text, lines, boxes and curves as SVG, one call each."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Svg:
    """A drawing of a ``width``, which grows downwards. Colours are CSS: a value, or a class of ``style``."""

    def __init__(self, width: int, style: str = "") -> None:
        self._width = width
        self._style = style
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, **attributes: object) -> None:
        """Write a text, whose baseline begins there."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{_listed(attributes)}>{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, **attributes: object) -> None:
        """Draw a line."""
        self._parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"{_listed(attributes)}/>')

    def box(self, x: float, y: float, width: float, height: float, title: str = "", **attributes: object) -> None:
        """Fill a box; its title shows under the pointer."""
        told = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}"{_listed(attributes)}>{told}</rect>'
        )

    def curve(self, points: Iterable[tuple[float, float]], **attributes: object) -> None:
        """Draw lines from point to point."""
        listed = " ".join(f"{x:g},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{listed}" fill="none"{_listed(attributes)}/>')

    def document(self, height: float, background: str = 'fill="white"') -> str:
        """Return the drawing."""
        style = f"<style>{self._style}</style>" if self._style else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._width} {height:g}" font-family="sans-serif" '
            f'font-size="11">{style}<rect width="100%" height="100%" {background}/>{"".join(self._parts)}</svg>\n'
        )


def _listed(attributes: dict[str, object]) -> str:
    # class is a word of Python's, and names of SVG have a dash
    return "".join(f' {name.rstrip("_").replace("_", "-")}="{value}"' for name, value in attributes.items())
