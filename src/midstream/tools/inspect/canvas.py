"""Lines, areas and words, as an SVG or a PNG file. Places are in pixels, from the upper left."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal, Protocol

from midstream.errors import UnsupportedError

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]

INK = "#30343b"
_PAPER = "#ffffff"
# A PNG is drawn so much larger and scaled down, which makes its edges smooth.
_FINER = 3


class Canvas(Protocol):
    """Something to draw on. Words are ASCII: the font of a PNG has nothing else."""

    def line(self, points: Sequence[Point], color: str, width: float) -> None:
        """From point to point."""
        ...

    def area(self, points: Sequence[Point], color: str, opacity: float) -> None:
        """All within the points."""
        ...

    def text(
        self, at: Point, words: str, size: float = 12, anchor: Anchor = "start", color: str = INK
    ) -> None:
        """Words on a base line that begins, has its middle or ends at a point."""
        ...

    def save(self, path: Path) -> None:
        """Writes the file."""
        ...


def make_canvas(path: Path, width: int, height: int) -> Canvas:
    """What makes a file of this name.

    Raises:
        UnsupportedError: neither SVG nor PNG; or Pillow is not installed, which makes a PNG.
    """
    kind = path.suffix.lower()
    if kind == ".svg":
        return SvgCanvas(width, height)
    if kind == ".png":
        return PngCanvas(width, height)
    raise UnsupportedError(f"{path}: expected a file that ends in .png or .svg")


class SvgCanvas:
    """An SVG file."""

    def __init__(self, width: int, height: int) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif">'
            f'<rect width="{width}" height="{height}" fill="{_PAPER}"/>'
        )
        self._parts: list[str] = []

    def line(self, points: Sequence[Point], color: str, width: float) -> None:
        self._parts.append(
            f'<polyline points="{_listed(points)}" fill="none" stroke="{color}" '
            f'stroke-width="{width:g}" stroke-linejoin="round"/>'
        )

    def area(self, points: Sequence[Point], color: str, opacity: float) -> None:
        self._parts.append(
            f'<polygon points="{_listed(points)}" fill="{color}" fill-opacity="{opacity:g}"/>'
        )

    def text(
        self, at: Point, words: str, size: float = 12, anchor: Anchor = "start", color: str = INK
    ) -> None:
        self._parts.append(
            f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" font-size="{size:g}" '
            f'text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'
        )

    def save(self, path: Path) -> None:
        path.write_text("\n".join([self._head, *self._parts, "</svg>", ""]), encoding="utf-8")


class PngCanvas:
    """A PNG file, by Pillow."""

    def __init__(self, width: int, height: int) -> None:
        try:
            from PIL import Image
        except ImportError:
            raise UnsupportedError(
                "a PNG needs Pillow: pip install pillow; or name an .svg file"
            ) from None
        self._size = (width, height)
        self._image: Any = Image.new("RGB", (width * _FINER, height * _FINER), _PAPER)

    def line(self, points: Sequence[Point], color: str, width: float) -> None:
        from PIL import ImageDraw

        ImageDraw.Draw(self._image).line(
            _finer(points), fill=color, width=round(width * _FINER), joint="curve"
        )

    def area(self, points: Sequence[Point], color: str, opacity: float) -> None:
        from PIL import Image, ImageDraw

        mask = Image.new("L", self._image.size, 0)
        ImageDraw.Draw(mask).polygon(_finer(points), fill=round(255 * opacity))
        self._image.paste(color, mask=mask)

    def text(
        self, at: Point, words: str, size: float = 12, anchor: Anchor = "start", color: str = INK
    ) -> None:
        from PIL import ImageDraw, ImageFont

        where = {"start": "ls", "middle": "ms", "end": "rs"}[anchor]
        font = ImageFont.load_default(size * _FINER)
        ImageDraw.Draw(self._image).text(
            _finer([at])[0], words, fill=color, font=font, anchor=where
        )

    def save(self, path: Path) -> None:
        from PIL import Image

        self._image.resize(self._size, Image.Resampling.LANCZOS).save(path, format="PNG")


def _listed(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _finer(points: Sequence[Point]) -> list[Point]:
    return [(x * _FINER, y * _FINER) for x, y in points]
