"""Lookup of the taps that layers and sites select in one model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from midstream.errors import SpecError
from midstream.plan.selection import Layers, Sites
from midstream.plan.shape import ModelShape
from midstream.sites import ENDS, NAMES, Tap, order, show_tap
from midstream.validation import at


def find_taps(
    layers: Layers, sites: Sites, shape: ModelShape, layer_field: str, site_field: str
) -> tuple[Tap, ...]:
    """Return the selected taps, in the order of a forward pass; the fields are for error paths."""
    names = sites.names
    taps: list[Tap] = []
    for place, site in enumerate(names):
        if site in ENDS:
            path = _element(site_field, place, len(names))
            taps.append((site, ENDS[site] % shape.num_layers))
            check_tapped(taps[-1], shape, path, path, names)
    if len(taps) == len(names):
        return tuple(sorted(taps, key=order))
    if layers.indices == "all":
        for place, site in enumerate(names):
            if site in ENDS:
                continue
            tapped = shape.tapped_layers(site)
            if not tapped:
                problem = _why_nowhere(site, names, shape)
                raise SpecError(_element(site_field, place, len(names)), problem)
            taps.extend((site, layer) for layer in tapped)
        return tuple(sorted(taps, key=order))
    indices = layers.indices
    chosen: dict[int, int] = {}
    for place, index in enumerate(indices):
        layer_path = _element(layer_field, place, len(indices))
        with at(layer_path):
            layer = find_layer(index, shape)
            if layer in chosen:
                raise SpecError(
                    "",
                    f"layer {index} is the same as layer {chosen[layer]}: the model has "
                    f"{shape.num_layers} layers",
                )
        chosen[layer] = index
        for site_index, site in enumerate(names):
            if site in ENDS:
                continue
            site_path = _element(site_field, site_index, len(names))
            check_tapped((site, layer), shape, site_path, layer_path, names)
            taps.append((site, layer))
    return tuple(sorted(taps, key=order))


def num_taps(layers: Layers, sites: Sites, num_layers: int) -> int:
    """Return the number of taps that layers and sites select at most, without looking them up."""
    indices = layers.indices
    return len(sites.names) * (num_layers if indices == "all" else min(num_layers, len(indices)))


def size_of(parts: Iterable[Any], num_layers: int) -> int:
    """Return the number of taps and of items of positions of captures, edits and probes."""
    size = 0
    for part in parts:
        size += num_taps(part.layers, part.sites, num_layers)
        size += len(part.positions.include) + len(part.positions.exclude)
    return size


def find_layer(index: int, shape: ModelShape) -> int:
    count = shape.num_layers
    if not -count <= index < count:
        raise SpecError(
            "",
            f"layer {index} is out of range: the model has {count} layers, "
            f"expected 0 to {count - 1} (or −{count} to −1)",
        )
    return index % count


def check_tapped(
    tap: Tap, shape: ModelShape, site_path: str, layer_path: str, names: Sequence[str] = ()
) -> None:
    """Check that a tap is there; `names` are all sites that are asked for, for the remedy."""
    if tap in shape.taps:
        return
    site, layer = tap
    reason = shape.reason(tap)
    if reason is not None:
        raise SpecError(layer_path, f"{show_tap(tap)} cannot be tapped: {reason}")
    path = layer_path if shape.tapped_layers(site) else site_path
    raise SpecError(
        path, _not_tapped(show_tap(tap), {site, *names}, shape, None if site in ENDS else layer)
    )


def _why_nowhere(site: str, names: Sequence[str], shape: ModelShape) -> str:
    reasons = [shape.reason((site, layer)) for layer in range(shape.num_layers)]
    if None in reasons:
        return _not_tapped(f"{site} at any layer", names, shape)
    return f"{site} cannot be tapped at any layer: {reasons[0]}"


def _not_tapped(
    what: str, names: Iterable[str], shape: ModelShape, layer: int | None = None
) -> str:
    """Return the problem of what is not tapped, with the settings of an engine that taps it too."""
    tapped = {site for site, _ in shape.taps}
    wanted = [site for site in NAMES if site in tapped.union(names)]
    layers = sorted({number for site, number in shape.taps if site not in ENDS})
    settings: dict[str, Any] = {}
    if layers and layer is not None and layer not in layers:
        more = sorted({*layers, layer})
        settings["layers"] = "all" if len(more) == shape.num_layers else more
    if not settings or not tapped.issuperset(wanted):
        settings["sites"] = wanted
    options = " ".join(
        f"--{name} {value if value == 'all' else ','.join(map(str, value))}"
        for name, value in settings.items()
    )
    return (
        f"{what} is not tapped; start the engine with LLM(…, midstream={json.dumps(settings)}), "
        f"or a server with {options}"
    )


def _element(name: str, index: int, length: int) -> str:
    """Return the error path of a list's element: without an index if it is the only one."""
    return name if length == 1 else f"{name}[{index}]"
