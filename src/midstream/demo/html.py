"""HTML elements as text; text content and attributes are escaped."""

from __future__ import annotations

import html
import json
from typing import Any

VOID = frozenset({"meta", "br"})


def escape(text: str) -> str:
    """Escape text for an element or an attribute.

    Characters that are illegal in a document (controls, lone surrogates) become U+FFFD: tokens are
    parts of byte strings, and a model may write anything.
    """
    legal = "".join(c if _is_legal(ord(c)) else "\ufffd" for c in text)
    return html.escape(legal, quote=True)


def _is_legal(code: int) -> bool:
    if code < 0x20:
        return code in (0x09, 0x0A, 0x0D)
    return not (0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000)


def tag(element: str, content: str = "", /, cls: str = "", **attributes: Any) -> str:
    """Return one element around content that must be escaped; attributes are escaped here."""
    pairs = {"class": cls, **attributes} if cls else attributes
    head = "".join(f' {name}="{escape(str(value))}"' for name, value in pairs.items())
    if element in VOID:
        return f"<{element}{head}>"
    return f"<{element}{head}>{content}</{element}>"


def data_block(name: str, value: Any) -> str:
    """Return a script element of JSON, which is not run; no text in it can end it early."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{escape(name)}">{text}</script>'
