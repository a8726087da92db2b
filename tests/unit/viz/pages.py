"""A strict reader of HTML: what is open, what is seen, and what it says."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br"}
# Attributes that make a browser fetch something.
LOADING = {"src", "srcset", "action", "data", "poster", "background", "formaction"}
HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "\"><b onclick='x'>&amp;",
    "a\nb\r\tc",
    "\u202eesrever\u2066",
    "\ud800",
    "\x00\x1b\x9f",
    "]]>--><!--",
    "",
]


@dataclass
class Element:
    """One element, with its attributes, its own text and what is in it."""

    name: str
    attributes: dict[str, str]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    @property
    def classes(self) -> set[str]:
        return set(self.attributes.get("class", "").split())


class Page(HTMLParser):
    """Reads a page or a part of one; raises where elements do not nest, or attributes repeat."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        text.encode("utf-8")
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(element)
        if self._open:
            self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop().name == tag, f"</{tag}> is out of order"

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, name: str = "", cls: str = "", **attributes: str) -> list[Element]:
        """The elements of a name, a class and some attributes, in order."""
        return [
            each
            for each in self.elements
            if (not name or each.name == name)
            and (not cls or cls in each.classes)
            and all(each.attributes.get(key) == value for key, value in attributes.items())
        ]

    def one(self, name: str = "", cls: str = "", **attributes: str) -> Element:
        (found,) = self.all(name, cls, **attributes)
        return found

    def check_harmless(self) -> None:
        """Nothing is fetched, no attribute is a script, and scripts are ours."""
        for each in self.elements:
            assert not LOADING & set(each.attributes), each
            assert not [name for name in each.attributes if name.startswith("on")], each
            assert "style" not in each.attributes, each
            link = each.attributes.get("href", "")
            assert link.startswith(("#", "data:application/octet-stream;base64,")) or not link, each
            drawn = each.attributes.get("xlink:href", "#")
            assert drawn.startswith(("#", "data:image/png;base64,")), each
        names = {each.name for each in self.elements}
        assert names.isdisjoint({"link", "img", "iframe", "object", "embed", "base"})
