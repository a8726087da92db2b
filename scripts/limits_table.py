"""Writer of the table of sites; the site has those of settings, metrics and limits (site_hooks.py).

scripts/limits_table.py [--check]
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import markers
from msgspec import Struct

from midstream import validation as spec_fields
from midstream.config.config import Config
from midstream.config.event_sinks import KINDS, EventSettings
from midstream.config.http import HttpSettings
from midstream.plan.positions import items
from midstream.plan.positions import select as selecting
from midstream.plan.vectors import matrix, vector
from midstream.runtime.vllm.engine_rules import RULES
from midstream.server.metrics import COUNTERS, GAUGES, HISTOGRAMS
from midstream.sites import SITES
from midstream.steering import registry


def pages() -> dict[str, dict[str, str]]:
    """Return every block that is written, by page and name."""
    return {"docs/guide.md": {"sites": sites()}}


def site_tables() -> dict[str, str]:
    """Return the tables that only the site has, by name."""
    return {
        "engine settings": engine_settings(),
        "sizes": sizes(),
        "settings": settings(Config),
        "http settings": settings(HttpSettings),
        "event settings": event_settings(),
        "metrics": metrics(),
    }


def engine_settings() -> str:
    """Return the table of engine settings that are rejected at start-up."""
    rows = [[f"`{rule.setting}`", rule.reason] for rule in RULES]
    return markers.table(["setting", "reason"], rows)


def sizes() -> str:
    """Return the table of limits of one request."""
    limits = {
        "layers, positions, or rows of a `Replace`, in one list": spec_fields.MAX_ITEMS,
        "captures, edits, or probes of one request": spec_fields.MAX_PARTS,
        "directions of an `Ablate`, rank of an `Affine` or `LoReFT`": matrix.MAX_RANK,
        "rows of the matrix of an `Affine`": matrix.MAX_WIDTH,
        "separate ranges of positions in one request": selecting.MAX_RANGES,
        "token ids in one selection": items.MAX_IDS,
        "characters of a `Text`": items.MAX_TEXT,
        "numbers in one vector (which must be as wide as the model)": vector.MAX_SIZE,
        "registered names": registry.MAX_NAMES,
    }
    rows = [[what, f"{most:,}"] for what, most in limits.items()]
    return markers.table(["item", "maximum"], rows, numbers=True)


def sites() -> str:
    """Return the table of sites and their aliases."""
    rows = [[f"`{s.name}`", ", ".join(f"`{a}`" for a in s.aliases), s.meaning] for s in SITES]
    return markers.table(["site", "aliases", "meaning"], rows)


def metrics() -> str:
    """Return the table of midstream's metrics at `/metrics`."""
    counters = [(f"{name}_total", text, labels) for name, text, labels in COUNTERS]
    rows = [
        [f"`midstream:{name}`", ", ".join(f"`{label}`" for label in labels), text]
        for name, text, labels in (*counters, *GAUGES, *HISTOGRAMS)
    ]
    return markers.table(["metric", "labels", "meaning"], rows)


def settings(cls: type[Struct]) -> str:
    """Return the table of settings, their defaults, and their meanings from the docstring."""
    return markers.table(["setting", "default", "meaning"], _settings(cls))


def event_settings() -> str:
    """Return the table of settings of sinks of events; those of all sinks first."""
    kinds = {"all": EventSettings, **KINDS}
    rows = [[name, *row] for name, cls in kinds.items() for row in _settings(cls)]
    return markers.table(["sink", "setting", "default", "meaning"], rows)


def _settings(cls: type[Struct]) -> list[list[str]]:
    """Return name, default and meaning of the settings that a class adds to those of its base."""
    text = (inspect.getdoc(cls) or "").partition("Attributes:")[2]
    found = re.findall(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    said = {name: " ".join(words.split()) for names, words in found for name in names.split(", ")}
    own = [name for name in cls.__struct_fields__ if name not in cls.__base__.__struct_fields__]
    defaults = {name: getattr(cls(), name) for name in own}
    return [[f"`{name}`", f"`{_show(value)}`", said[name]] for name, value in defaults.items()]


def _show(value: object) -> str:
    if isinstance(value, tuple):
        value = list(value)
    return f'"{value}"' if isinstance(value, str) else str(value).replace("'", '"')


if __name__ == "__main__":
    sys.exit(markers.main(pages(), __doc__))
