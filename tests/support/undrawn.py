"""Charts that are not drawn, for tests of what is around them: to draw one takes a fifth of a
second.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from xml.sax.saxutils import escape

from midstream.viz.chart import Chart


def _files(chart: Chart, *kinds: tuple[str, int], ground: str = "white") -> list[bytes]:
    """Return for each file an SVG of what it would have been drawn from."""
    texts = [escape(f"{kind} on {ground}\n{chart.title}\n{chart.text}") for kind in kinds]
    start = '<svg xmlns="http://www.w3.org/2000/svg" height="72pt" width="72pt">'
    return [f"{start}<text>{text}</text></svg>".encode() for text in texts]


@contextmanager
def undrawn() -> Iterator[None]:
    """Have the files of all charts tell their kind, title and numbers in place of a drawing."""
    files: Any = _files
    with patch.object(Chart, "_rendered", files):
        yield
