"""HTML elements as text. Tokens may be anything, so every text counts as hostile and is escaped."""

from __future__ import annotations

import html
import json
import unicodedata
from typing import Any

VOID = frozenset({"meta", "br"})

# Embeddings, overrides and isolates: they reorder the text around them.
_BIDI = frozenset((*range(0x202A, 0x202F), *range(0x2066, 0x206A)))
_SHORT = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
# Joiners, which are parts of emoji and of words in several scripts.
_JOINERS = ("\u200c", "\u200d")


def escape(text: str) -> str:
    """Escape text; what is illegal in a document, or reorders text around it, becomes U+FFFD."""
    safe = "".join(c if _is_safe(ord(c)) else "\ufffd" for c in text)
    return html.escape(safe, quote=True)


def _is_safe(code: int) -> bool:
    if code < 0x20:
        return code in (0x09, 0x0A, 0x0D)
    return not (0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000 or code in _BIDI)


def visible(token: str) -> str:
    """Return a token with signs for invisible characters, and for its spaces if it has no more."""
    if token and not token.strip(" "):
        return "␣" * len(token)
    return "".join(_SHORT.get(c) or (c if _is_seen(c, token) else _code(c)) for c in token)


def _is_seen(character: str, token: str) -> bool:
    category = unicodedata.category(character)
    if character in _JOINERS:
        return len(token) > 1
    return category not in ("Cc", "Cf", "Cn", "Cs", "Zl", "Zp")


def _code(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def tag(element: str, content: str = "", /, cls: str = "", **attributes: Any) -> str:
    """Return an element around escaped content; `aria_label` is `aria-label`, None is left out."""
    pairs = {"class": cls, **attributes} if cls else attributes
    head = "".join(
        f' {name.replace("_", "-")}="{escape(str(value))}"'
        for name, value in pairs.items()
        if value is not None
    )
    if element in VOID:
        return f"<{element}{head}>"
    return f"<{element}{head}>{content}</{element}>"


def data_block(name: str, value: Any) -> str:
    """Return a script element of JSON, which is not run; no text in it can end it early."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{escape(name)}">{text}</script>'
