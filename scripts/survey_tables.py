"""Tables of docs/models.md from the results of scripts/models_survey.py."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import markers

from midstream.sites import INNER

DATA = markers.ROOT / "docs/data/models.json"
# Kinds of architectures: the heading of their column, and of a short one.
KINDS = {"text": "vLLM", "multimodal": "vLLM, multimodal", "backend": "Transformers backend"}
COUNTED = ("vLLM's text models", "its multimodal models", "Transformers backend")
OUTCOMES = ("ok", "not comparable", "refused", "not compared", "cannot be built", "wrong")

# What a reason of the survey contains, by how the page says it.
REASONS = {
    "vLLM itself differs in the logits of plain requests": "vLLM itself differs from",
    "its layer class is not in the table": "does not know what",
    "its layers were not found": "its decoder layers were not found",
    "vLLM differs, and transformers' model fails": "transformers' model fails after",
    "it is an encoder-decoder model": "an encoder-decoder model: ",
}


def blocks() -> dict[str, str]:
    """Return every block, by name."""
    found = json.loads(DATA.read_text(encoding="utf-8"))
    models: dict[str, dict[str, Any]] = found["models"]
    by_outcome: dict[str, dict[str, dict[str, Any]]] = {
        outcome: {name: one for name, one in models.items() if one["outcome"] == outcome}
        for outcome in OUTCOMES
    }
    return {
        "survey counts": counts(found),
        "survey ok": right(by_outcome["ok"]),
        "survey own": own(by_outcome["ok"]),
        "survey images": images(by_outcome["ok"]),
        "survey hosts": hosts(models),
        "survey inner": inner(by_outcome["ok"]),
        **{
            f"survey {outcome}": by_reason(by_outcome[outcome])
            for outcome in ("not comparable", "refused", "not compared", "cannot be built")
        },
    }


def parity() -> str:
    """Return README's item on the architectures that are ok."""
    models = json.loads(DATA.read_text(encoding="utf-8"))["models"].values()
    right = [one for one in models if one["outcome"] == "ok"]
    own = [one for one in right if one.get("compared_with", "").startswith("vLLM's own modules")]
    shown = [one for one in right if one.get("images", "").startswith("an image")]
    return (
        f"- **Parity.** [{len(right) - len(own)} architectures](docs/models.md) match transformers "
        "at every site that could be compared, on small random models; "
        f"{len(own)} more match vLLM's own modules. {len(shown)} of all were run with an image in "
        "the prompt. `midstream doctor MODEL` checks yours."
    )


def counts(found: dict[str, Any]) -> str:
    """Return the table of the number of architectures by outcome, with date and versions."""
    models = list(found["models"].values())
    rows = []
    for outcome in OUTCOMES:
        each = [
            sum(one["outcome"] == outcome and _kind_of(one) == kind for one in models)
            for kind in KINDS
        ]
        rows.append([outcome, *map(str, each), str(sum(each))])
    for place, item in enumerate(("an image", "a sound"), start=1):
        shown = [
            one
            for one in models
            if one["outcome"] == "ok" and one.get("images", "").startswith(item)
        ]
        each = [sum(_kind_of(one) == kind for one in shown) for kind in KINDS]
        rows.insert(
            place, [f"of these, with {item} in the prompt", *map(str, each), str(sum(each))]
        )
    table = markers.table(["result", *COUNTED, "total"], rows, numbers=True)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{table}\n\nOn {found['date']}, with {versions}."


def images(models: dict[str, dict[str, Any]]) -> str:
    """Return the table of multimodal architectures that are ok: by what was in their prompts."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, one in models.items():
        if one.get("multimodal"):
            compared = one.get("compared_with", "transformers")
            found[one.get("images", "text alone"), compared].append(f"`{_plain(name)}`")
    rows = [[*key, ", ".join(names)] for key, names in sorted(found.items())]
    return markers.table(["in the prompt", "compared with", "architectures"], rows)


def hosts(models: dict[str, dict[str, Any]]) -> str:
    """Return the table of architectures that were run elsewhere, by host and outcome."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, one in models.items():
        if one.get("host"):
            found[one["host"], one["outcome"]].append(f"`{_plain(name)}`")
    rows = [[*key, ", ".join(names)] for key, names in sorted(found.items())]
    return markers.table(["host", "result", "architectures"], rows) if rows else "None."


def _kind_of(model: dict[str, Any]) -> str:
    if model["runs"] != KINDS["text"]:
        return "backend"
    return "multimodal" if model.get("multimodal") else "text"


def right(models: dict[str, dict[str, Any]]) -> str:
    """Return the table of architectures that are ok: those that lack the same sites."""
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, one in models.items():
        absent = (_sites(_outer(one["lacking"])), _sites(_outer(one["not compared"])))
        found[absent][_kind_of(one)].append(f"`{_plain(name)}`")
    rows = [
        [lacking, not_compared, *(", ".join(by_kind[kind]) for kind in KINDS)]
        for (lacking, not_compared), by_kind in sorted(found.items())
    ]
    return markers.table(["missing", "not compared", *KINDS.values()], rows)


def own(models: dict[str, dict[str, Any]]) -> str:
    """Return the table of architectures that match vLLM's own modules, by what was compared."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, one in models.items():
        if "own modules" in one.get("compared_with", "") and not one.get("multimodal"):
            found[one["compared_with"]].append(f"`{_plain(name)}`")
    rows = [[compared, ", ".join(names)] for compared, names in sorted(found.items())]
    return markers.table(["compared with", "architectures"], rows) if rows else "None."


def inner(models: dict[str, dict[str, Any]]) -> str:
    """Return the table of sites inside attention and the MLP: architectures that lack the same."""
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, one in models.items():
        parts = [_inner(one[outcome]) for outcome in ("lacking", "not compared")]
        absent = {site for part in parts for sites in part.values() for site in sites}
        cells = tuple(
            "; ".join(f"{_names(sites)}: {_cell(reason)}" for reason, sites in part.items())
            for part in parts
        )
        has = _names([site for site in INNER if site not in absent])
        found[(has, *cells)].append(f"`{_plain(name)}`")
    rows = [
        [", ".join(names), *cells]
        for cells, names in sorted(found.items(), key=lambda each: (-len(each[0][0]), each))
    ]
    return markers.table(["architectures", "have in all layers", "missing", "not compared"], rows)


def _inner(reasons: dict[str, list[str]]) -> dict[str, list[str]]:
    found = {
        reason: [site for site in INNER if site in sites]
        for reason, sites in sorted(reasons.items())
    }
    return {reason: sites for reason, sites in found.items() if sites}


def _outer(reasons: dict[str, list[str]]) -> dict[str, list[str]]:
    return {
        reason: [site for site in sites if site not in INNER] for reason, sites in reasons.items()
    }


def by_reason(models: dict[str, dict[str, Any]]) -> str:
    """Return the table of other architectures, by the first words of the reason."""
    if not models:
        return "None."
    found: dict[str, list[str]] = defaultdict(list)
    for name, one in models.items():
        found[_cell(_kind(one["reason"]))].append(f"`{_plain(name)}`")
    rows = [[reason, ", ".join(names)] for reason, names in sorted(found.items())]
    return markers.table(["reason", "architectures"], rows)


def _kind(reason: str) -> str:
    """Return what reasons of one kind have in common."""
    for kind, said in REASONS.items():
        if said in reason:
            return kind
    layers, _, why = reason.partition(" cannot be tapped: ")
    return why or layers.partition(": ")[0]


def _plain(name: str) -> str:
    return name.removesuffix("ForCausalLM")


def _sites(reasons: dict[str, list[str]]) -> str:
    return _names(list({name: None for each in reasons.values() for name in each}))


def _names(sites: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in sites)


def _cell(reason: str) -> str:
    text = reason.replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 240 else text[:239] + "…"
