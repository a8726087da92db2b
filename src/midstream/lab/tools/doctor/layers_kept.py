"""Selection of the layers that a small copy keeps: one of each kind.

A configuration encodes the kind of a layer as lists (or strings) with one entry per layer, and as
lists of layer indices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from midstream.lab.attribution.hooked.model import COUNTS

# Up to this many kinds of layers are kept, even if fewer layers are requested.
MOST = 4
_INDICES = re.compile(r"(_layers|_idxs|_ids|_indices|_index)$")
_BY_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types")


def count_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers of a configuration."""
    for name in COUNTS:
        if isinstance(config.get(name), int):
            return int(config[name])
    for name in _BY_LAYER:
        if isinstance(config.get(name), list):
            return len(config[name])
    raise ValueError(f"its configuration has no number of layers (one of {', '.join(COUNTS)})")


def choose(config: Mapping[str, Any], wanted: int) -> list[int]:
    """Return the layers to keep, ascending: the first of each kind, then the first layers until
    there are `wanted`.
    """
    total = count_layers(config)
    kinds: dict[tuple[str, ...], int] = {}
    for layer in range(total):
        kinds.setdefault(tuple(_kind(config, layer, total)), layer)
    kept = set(sorted(kinds.values())[: max(wanted, MOST)])
    for layer in range(total):
        if len(kept) >= min(wanted, total):
            break
        kept.add(layer)
    return sorted(kept)


def keep(config: dict[str, Any], kept: Sequence[int]) -> None:
    """Remove all other layers from a configuration, in place.

    Args:
        kept: layer indices, ascending; see `choose`.
    """
    total = count_layers(config)
    for name in COUNTS:
        if isinstance(config.get(name), int):
            config[name] = len(kept)
    for name, value in list(config.items()):
        if _is_indices(name, value, total):
            config[name] = [new for new, old in enumerate(kept) if old in value]
        elif _is_by_layer(value, total):
            picked = [value[old] for old in kept]
            config[name] = "".join(picked) if isinstance(value, str) else picked
        elif name == "per_layer_config" and isinstance(value, dict):
            by_layer = {int(key): layer_config for key, layer_config in value.items()}
            config[name] = {
                str(new): by_layer[old] for new, old in enumerate(kept) if old in by_layer
            }


def _kind(config: Mapping[str, Any], layer: int, total: int) -> Iterator[str]:
    """Yield the entries that distinguish this layer from others."""
    for name, value in config.items():
        if _is_indices(name, value, total):
            yield str(layer in value)
        elif _is_by_layer(value, total):
            yield str(value[layer])
        elif name == "per_layer_config" and isinstance(value, dict):
            yield str({int(key): layer_config for key, layer_config in value.items()}.get(layer))


def _is_by_layer(value: object, total: int) -> bool:
    return total > 1 and isinstance(value, (list, str)) and len(value) == total


def _is_indices(name: str, value: object, total: int) -> bool:
    if not (_INDICES.search(name) and isinstance(value, list) and value):
        return False
    if not all(isinstance(index, int) and not isinstance(index, bool) for index in value):
        return False
    return max(value) < total and value == sorted(set(value))
