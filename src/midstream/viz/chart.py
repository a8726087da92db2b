"""Charts, drawn by matplotlib: in notebooks, in files, in pages, and into a figure of yours."""

from __future__ import annotations

import base64
import io
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, NamedTuple
from xml.etree import ElementTree

import numpy as np

from midstream.errors import MissingExtraError, SpecError
from midstream.validation import kind
from midstream.viz.figure_style import CHARACTER, COLUMN, PAGE, styled
from midstream.viz.markup import tag
from midstream.viz.picture import Picture, columns_of, details, document, figure
from midstream.viz.theme import VARIABLES

_SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
# Pixels per inch: of files, of notebooks, and of pages.
_FILE_DPI, _NOTEBOOK_DPI, _PAGE_DPI = 300, 192, 120
# By whether there are values below a colour bar, and above it.
_EXTEND = {
    (False, False): "neither",
    (True, False): "min",
    (False, True): "max",
    (True, True): "both",
}
_DATES = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


class ColorBar(NamedTuple):
    """A colour bar; panels with equal ones share it."""

    title: str  # with the unit
    low: float
    high: float
    center: float | None  # with the neutral colour


@dataclass(frozen=True)
class Panel:
    """What is drawn into one pair of axes."""

    title: str
    size: tuple[float, float]  # width and height in inches
    rows: Sequence[Sequence[str]]  # the values as text
    draw: Callable[[Any], tuple[Any, ColorBar] | None]  # returns what a colour bar is of, and it

    @property
    def text(self) -> str:
        return (f"{self.title}\n" if self.title else "") + columns_of(self.rows)


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
            SpecError: `ax` is something else, or of another number.
            MissingExtraError: matplotlib is not installed.
        """
        MissingExtraError.require("matplotlib", "a chart")
        if ax is None:
            from matplotlib import pyplot

            with styled():
                axes = self._new(pyplot.figure)[1]
        else:
            axes = list(np.ravel(np.asarray(ax, dtype=object)))
            for panel_axes in axes:
                if not hasattr(panel_axes, "imshow"):
                    raise SpecError("ax", f"expected `Axes` of matplotlib, got {kind(panel_axes)}")
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
        return figure("", tag("div", _inline(svg, self.title), "scroll") + details(self.text))

    def _new(self, make: Callable[..., Any]) -> tuple[Any, list[Any]]:
        """Return a figure with the panels drawn, and their axes."""
        width, height = np.max([panel.size for panel in self.panels], axis=0).tolist()
        columns = max(1, min(len(self.panels), int(PAGE // width)))
        rows, margin = ceil(len(self.panels) / columns), 0.25 if len(self.panels) > 1 else 0
        size = columns * width, rows * height + margin
        drawing = make(figsize=size, layout="constrained")
        every = list(drawing.subplots(rows, columns, squeeze=False).flat)
        axes = every[: len(self.panels)]
        for unused in every[len(axes) :]:
            unused.remove()
        self._draw(axes)
        if len(axes) > 1:
            title = wrapped(self.title, size[0])
            drawing.suptitle(title, x=0.01, ha="left", size=9, weight="bold")
        return drawing, axes

    def _draw(self, axes: Sequence[Any]) -> None:
        bars: dict[ColorBar, list[tuple[Any, Any]]] = {}
        for panel, panel_axes in zip(self.panels, axes, strict=True):
            drawn = panel.draw(panel_axes)
            panel_axes.set_title(wrapped(panel.title, panel.size[0]), parse_math=False)
            if drawn is not None:
                bars.setdefault(drawn[1], []).append((drawn[0], panel_axes))
        # One bar serves all panels with its colours.
        for bar, served in bars.items():
            mappables, places = zip(*served, strict=True)
            values = np.concatenate(
                [np.ma.compressed(mappable.get_array()) for mappable in mappables]
            )
            beyond = bool((values < bar.low).any()), bool((values > bar.high).any())
            options = {"ax": list(places), "extend": _EXTEND[beyond], "pad": 0.02, "aspect": 25}
            made = places[0].figure.colorbar(mappables[0], **options)
            made.set_label(wrapped(bar.title, self.panels[0].size[1]), parse_math=False)
            made.outline.set_visible(False)
            if bar.center is not None and values.min(initial=np.inf) >= bar.center:
                made.ax.set_ylim(bar.center, bar.high)  # nothing is below it

    def _rendered(self, *kinds: tuple[str, int], ground: str = "white") -> list[bytes]:
        """Return files as bytes, by (format, pixels per inch); equal charts have equal ones."""
        files = []
        with styled(self.text):
            from matplotlib.figure import Figure

            drawing, _ = self._new(Figure)
            drawing.draw_without_rendering()
            drawing.set_layout_engine("none")  # it is laid out once for all formats
            options: dict[str, Any] = {
                "facecolor": ground,
                "bbox_inches": "tight",
                "pad_inches": 0.03,
            }
            for name, dpi in kinds:
                file = io.BytesIO()
                drawing.savefig(file, format=name, dpi=dpi, metadata=_DATES.get(name), **options)
                files.append(file.getvalue())
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
    parents = {child: parent for parent in root.iter() for child in parent}
    used: set[str] = set()
    for element, parent in parents.items():
        if element.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
            parent.remove(element)
        for part in element.attrib.pop("style", "").split(";"):
            name, _, value = (piece.strip() for piece in part.partition(":"))
            if name and not name.startswith("font-family"):
                element.set(name, VARIABLES.get(value, value))
        links = [value for value in element.attrib.values() if value.startswith(("#", "url(#"))]
        used.update(link.partition("#")[2].rstrip(")") for link in links)
    for element in parents:
        if element.get("id") not in used:
            element.attrib.pop("id", None)
    for side in ("height", "width"):
        inches = float(root.attrib[side].removesuffix("pt")) / 72
        root.set(side, f"{inches * _PAGE_DPI:.0f}")
    # A narrow page shrinks the figure of a column, and scrolls a wider one.
    style = "chart wide" if inches > 1.2 * COLUMN else "chart"
    root.attrib.update({"class": style, "role": "img", "aria-label": title or "chart"})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _LINK)
    return ElementTree.tostring(root, encoding="unicode")


class Charted(ABC):
    """A result that notebooks show as a chart."""

    __slots__ = ()

    @abstractmethod
    def picture(self, *args: Any, **arguments: Any) -> Chart: ...

    def plot(self, ax: Any = None, *args: Any, **arguments: Any) -> Any:
        """Draw `picture()`, whose arguments it takes after `ax`; see `Chart.plot`."""
        return self.picture(*args, **arguments).plot(ax)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        try:
            return self.picture()._repr_mimebundle_()
        except SpecError as error:  # such as too many cells
            return {"text/plain": f"{self}\n({error})"}
