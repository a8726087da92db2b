"""What others have written, for a terminal."""

from __future__ import annotations


def visible(text: str) -> str:
    """The same, with what would make a terminal do something spelt out."""
    return "".join(
        each if each.isprintable() or each == "\n" else f"\\x{ord(each):02x}" for each in text
    )
