"""Charts, drawn by matplotlib: in notebooks, in files, in pages, and into a figure of yours."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol
from xml.etree import ElementTree

import numpy as np

from midstream.errors import MissingExtraError, SpecError
from midstream.validation import kind
from midstream.viz.figure_style import CHARACTER, COLUMN, PAGE, styled
from midstream.viz.markup import escape, tag
from midstream.viz.picture import Picture, document, figure
from midstream.viz.theme import VARIABLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
# Pixels per inch: of files, of notebooks, and of CSS.
_FILE_DPI, _NOTEBOOK_DPI, _PAGE_DPI = 300, 192, 120


class ColorBar(NamedTuple):
    """A colour bar; panels with equal ones share it."""

    title: str  # with the unit
    low: float
    high: float
    extend: str  # the ends beyond which there are values: "neither", "both", "min", "max"


class Panel(Protocol):
    """What is drawn into one pair of axes."""

    @property
    def title(self) -> str: ...

    @property
    def text(self) -> str:
        """The values as plain text."""
        ...

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches."""
        ...

    def draw(self, axes: Axes) -> tuple[ScalarMappable, ColorBar] | None:
        """Draw into axes; return what a colour bar is of, and the bar; None: without one."""
        ...


class Chart(Picture):
    """A picture that matplotlib draws: one panel, or several side by side.

    Its PDF and SVG have text as text; notebooks show it as SVG or PNG.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".svg", ".pdf", ".png", ".html")

    def __init__(self, title: str, panels: Sequence[Panel]) -> None:
        self.panels = tuple(panels)
        text = "\n\n".join(panel.text for panel in panels)
        super().__init__(title, text if len(panels) == 1 else f"{title}\n\n{text}")

    @staticmethod
    def beside(title: str, charts: Sequence[Chart]) -> Chart:
        """Return one chart with the panels of several."""
        return Chart(title, [panel for chart in charts for panel in chart.panels])

    def plot(self, ax: Any = None) -> Any:
        """Draw with matplotlib.

        Args:
            ax: the `Axes` to draw on, whose figure keeps its own style; of several panels a list or
                an array of as many. None: a new figure of pyplot.

        Returns:
            The `Axes`; of several panels an array of them.

        Raises:
            SpecError: `ax` is something else, or there are as many as there are not panels.
            MissingExtraError: matplotlib is not installed.
        """
        MissingExtraError.require("matplotlib", "a chart")
        if ax is None:
            from matplotlib import pyplot

            with styled():
                axes = self._lay_out(pyplot.figure(figsize=self._size, layout="constrained"))
        else:
            axes = list(np.ravel(np.asarray(ax, dtype=object)))
            for each in axes:
                if not hasattr(each, "imshow"):
                    raise SpecError("ax", f"expected `Axes` of matplotlib, got {kind(each)}")
            if len(axes) != len(self.panels):
                wanted = f"{len(self.panels)}, one for each panel"
                raise SpecError("ax", f"expected {wanted}, got {len(axes)}")
            self._draw(axes)
        return axes[0] if len(axes) == 1 else np.array(axes, dtype=object)

    def encode(self, suffix: str) -> bytes:
        if suffix == ".html":
            return document(self.title or "midstream", self.body).encode()
        return self._rendered((suffix[1:], _FILE_DPI))[0]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        try:
            svg, png = self._rendered(("svg", _FILE_DPI), ("png", _NOTEBOOK_DPI))
        except MissingExtraError as error:
            return {"text/plain": f"{self.text}\n({error})"}
        data = {
            "image/svg+xml": svg.decode(),
            "image/png": base64.b64encode(png).decode(),
            "text/plain": self.text,
        }
        # A PNG's width is the four bytes after the name of its first part.
        width = int.from_bytes(png[16:20], "big") * 96 // _NOTEBOOK_DPI
        return data, {"image/png": {"width": width}}

    @property
    def body(self) -> str:
        """The figure as HTML: an SVG whose lines and texts follow the page's colours, and the
        numbers.
        """
        (svg,) = self._rendered(("svg", _FILE_DPI), ground="none")
        numbers = tag("summary", "Numbers") + tag("pre", escape(self.text), "numbers")
        return figure("", tag("div", _inline(svg, self.title), "scroll") + tag("details", numbers))

    @property
    def _grid(self) -> tuple[int, int]:
        columns = max(1, min(len(self.panels), int(PAGE // self._largest[0])))
        return ceil(len(self.panels) / columns), columns

    @property
    def _largest(self) -> tuple[float, float]:
        sizes = [panel.size for panel in self.panels]
        return max(width for width, _ in sizes), max(height for _, height in sizes)

    @property
    def _size(self) -> tuple[float, float]:
        (rows, columns), (width, height) = self._grid, self._largest
        return columns * width, rows * height + (0.25 if len(self.panels) > 1 else 0)

    def _lay_out(self, drawing: Figure) -> list[Any]:
        """Draw the panels into a figure, and return their axes."""
        every = list(drawing.subplots(*self._grid, squeeze=False).flat)
        axes = every[: len(self.panels)]
        for unused in every[len(axes) :]:
            unused.remove()
        self._draw(axes)
        if len(axes) > 1 and self.title:
            title = wrapped(self.title, drawing.get_figwidth())
            drawing.suptitle(title, x=0.01, ha="left", size=9, weight="bold")
        return axes

    def _draw(self, axes: Sequence[Any]) -> None:
        bars: dict[ColorBar, tuple[ScalarMappable, list[Any]]] = {}
        for panel, each in zip(self.panels, axes, strict=True):
            drawn = panel.draw(each)
            each.set_title(wrapped(panel.title, panel.size[0]), parse_math=False)
            if drawn is not None:
                bars.setdefault(drawn[1], (drawn[0], []))[1].append(each)
        # One bar serves all panels with its colours.
        for bar, (mappable, places) in bars.items():
            made = places[0].figure.colorbar(
                mappable, ax=places, extend=bar.extend, pad=0.02, aspect=25
            )
            made.set_label(bar.title, parse_math=False)
            made.outline.set_visible(False)

    def _rendered(self, *kinds: tuple[str, int], ground: str = "white") -> list[bytes]:
        """Return files as bytes, by (format, pixels per inch); equal charts have equal ones."""
        files = []
        with styled(self.text):
            from matplotlib.figure import Figure

            drawing = Figure(figsize=self._size, layout="constrained")
            self._lay_out(drawing)
            drawing.draw_without_rendering()
            drawing.set_layout_engine("none")  # it is laid out once for all formats
            for name, dpi in kinds:
                date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(name)
                file: dict[str, Any] = {
                    "format": name,
                    "dpi": dpi,
                    "metadata": date,
                    "facecolor": ground,
                }
                buffer = io.BytesIO()
                drawing.savefig(buffer, bbox_inches="tight", pad_inches=0.03, **file)
                files.append(buffer.getvalue())
        return files


def wrapped(text: str, width: float) -> str:
    """Return a title in lines that fit into a width in inches."""
    return textwrap.fill(text, max(12, int(width / (1.25 * CHARACTER))))


def _inline(svg: bytes, title: str) -> str:
    """Return matplotlib's SVG as an element of a page.

    A page's security policy forbids style attributes, which become attributes of the same names;
    the page gives the font, and the colours of light and dark.
    """
    root = ElementTree.fromstring(svg)
    used = set()
    for element in root.iter():
        for child in list(element):
            if child.tag in (f"{_SVG}metadata", f"{_SVG}style"):
                element.remove(child)
        for part in element.attrib.pop("style", "").split(";"):
            name, _, value = (piece.strip() for piece in part.partition(":"))
            if name and name not in ("font-family", "font"):
                element.set(name, VARIABLES.get(value, value))
        for value in element.attrib.values():
            if value.startswith(("#", "url(#")):
                used.add(value.partition("#")[2].rstrip(")"))
    for element in root.iter():
        if element.get("id") not in used:
            element.attrib.pop("id", None)
    width, height = (float(root.attrib[name].removesuffix("pt")) for name in ("width", "height"))
    root.set("width", f"{width * _PAGE_DPI / 72:.0f}")
    root.set("height", f"{height * _PAGE_DPI / 72:.0f}")
    # A narrow page shrinks the figure of a column, and scrolls a wider one.
    root.set("class", "chart wide" if width > 72 * 1.2 * COLUMN else "chart")
    root.set("role", "img")
    root.set("aria-label", title or "chart")
    ElementTree.register_namespace("", _SVG[1:-1])
    ElementTree.register_namespace("xlink", _LINK[1:].partition("}")[0])
    return ElementTree.tostring(root, encoding="unicode")
