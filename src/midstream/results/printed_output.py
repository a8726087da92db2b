"""What an output prints: of each result one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from midstream.results.readouts import RESULTS

_SHOWN = 300  # characters of a text that are printed
_RECEIPT_LINES = 3
_PRINTED = ("activations", *RESULTS, "probes")


def results_of(results: Mapping[str, Any]) -> list[str]:
    """Return the lines of results by name; None: there is none."""
    present = {name: results.get(name) for name in _PRINTED}
    lines = [f"{name}: {value!r}" for name, value in present.items() if value is not None]
    receipt = results.get("receipt")
    if receipt is not None:
        told = str(receipt).split(": ", 1)[1].splitlines()
        more = " …" if len(told) > _RECEIPT_LINES else ""
        told = [*(line.strip() for line in told[:_RECEIPT_LINES]), *receipt.problems]
        lines.append(f"receipt: {'; '.join(dict.fromkeys(told))}{more}")
    return lines


def shown_text(text: str | None) -> str:
    """Return the beginning of a text, in quotes."""
    if text is None:
        return "None"
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r} …"
