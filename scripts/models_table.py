"""Writer of the summary of docs/models.md; the site has its other tables (site_hooks.py).

scripts/models_table.py [--check]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import markers
import survey_tables

from midstream.runtime.models.convention import Choice, Entry, LayerConvention, Output, Refusal
from midstream.runtime.models.hf_layers import HF_MODELS
from midstream.runtime.models.vllm_layers import MODELS, VENDOR
from midstream.sites import NAMES

SOURCES: dict[str, Mapping[str, Entry]] = {
    "vLLM's models": MODELS,
    "vLLM's vendor models": VENDOR,
    "transformers' models": HF_MODELS,
}
OUTCOMES = ("all sites", "not all sites", "depends on the layer's settings", "rejected")


def outcome(entry: Entry) -> str:
    """Return the outcome of a class, one of OUTCOMES."""
    if isinstance(entry, Refusal):
        return OUTCOMES[3]
    if isinstance(entry, Choice):
        return OUTCOMES[2]
    return OUTCOMES[1] if _lacking(entry) else OUTCOMES[0]


def pages() -> dict[str, dict[str, str]]:
    """Return every block that is written, by page and name."""
    return {
        "README.md": {"parity": survey_tables.parity()},
        "docs/models.md": {"survey counts": survey_tables.blocks()["survey counts"]},
    }


def site_tables() -> dict[str, str]:
    """Return the tables that only the site has, by name."""
    return {
        **survey_tables.blocks(),
        "counts": counts(),
        "lacking": lacking(),
        "refused": refused(),
        "more": conditions(),
    }


def counts() -> str:
    """Return the table of the number of classes by outcome."""
    rows = []
    for word in OUTCOMES:
        found = [
            sum(outcome(entry) == word for entry in entries.values())
            for entries in SOURCES.values()
        ]
        rows.append([word, *map(str, found), str(sum(found))])
    sums = [len(entries) for entries in SOURCES.values()]
    rows.append(["total", *map(str, sums), str(sum(sums))])
    return markers.table(["decoder-layer classes", *SOURCES, "total"], rows, numbers=True)


def lacking() -> str:
    """Return the table of classes that lack sites with all settings, by sites and reason."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for source, name, entry in _all():
        if isinstance(entry, LayerConvention):
            for reason, sites in _lacking(entry).items():
                found[", ".join(f"`{site}`" for site in sites), reason].append(_label(source, name))
    rows = [[*key, ", ".join(sorted(names))] for key, names in sorted(found.items())]
    return markers.table(["sites", "reason", "classes"], rows)


def refused() -> str:
    """Return the table of rejected classes, by reason."""
    found: dict[str, list[str]] = defaultdict(list)
    for source, name, entry in _all():
        if isinstance(entry, Refusal):
            found[entry.reason].append(_label(source, name))
    rows = [[reason, ", ".join(sorted(names))] for reason, names in sorted(found.items())]
    return markers.table(["reason", "classes"], rows)


def conditions() -> str:
    """Return the table of classes that are rejected, or lack a site, in some engines."""
    found: dict[str, list[str]] = defaultdict(list)
    for source, name, entry in _all():
        for leaf in _leaves(entry):
            if leaf.tp_partial:
                found["rejected with `tensor_parallel_size` above 1"].append(_label(source, name))
            if leaf.float16_scaled:
                found["rejected in float16"].append(_label(source, name))
            for site, place in leaf.branches.items():
                if isinstance(place, Output) and place.partial:
                    what = f"no `{site}` with `tensor_parallel_size` above 1"
                    found[what].append(_label(source, name))
    rows = [[what, ", ".join(sorted(set(names)))] for what, names in sorted(found.items())]
    return markers.table(["condition", "classes"], rows)


def _all() -> Iterator[tuple[str, str, Entry]]:
    for source, entries in SOURCES.items():
        for name, entry in entries.items():
            yield source, name, entry


def _label(source: str, name: str) -> str:
    return f"`{name}`" + (" (transformers)" if source.startswith("transformers") else "")


def _lacking(entry: LayerConvention) -> dict[str, list[str]]:
    """Return the sites that a layer lacks, by reason."""
    found: dict[str, list[str]] = defaultdict(list)
    for site in NAMES:
        reason = entry.lack(site)
        if reason is not None:
            found[reason].append(site)
    return found


def _leaves(entry: Entry) -> Iterator[LayerConvention]:
    if isinstance(entry, Choice):
        yield from _leaves(entry.true)
        yield from _leaves(entry.false)
    elif isinstance(entry, LayerConvention):
        yield entry


if __name__ == "__main__":
    sys.exit(markers.main(pages(), __doc__))
