"""Resolution of a `Features` against a model and a prompt."""

from __future__ import annotations

from midstream.errors import SpecError
from midstream.spec.features import Features
from midstream.spec.positions.position_set import Where
from midstream.spec.resolve.resolved import Pattern, ResolvedCapture
from midstream.spec.resolve.tap_lookup import find_taps
from midstream.spec.shape import ModelShape

FEATURES = "features"


def resolve_features(
    asked: Features, source: int, where: Where, shape: ModelShape
) -> ResolvedCapture:
    """Resolve a `Features` that has a layer and a site. Its pattern gets an encoder by
    `with_weights`, which knows the SAE.

    Args:
        source: its index in the plan.
    """
    if asked.layer is None or asked.site is None:
        missing = "layer" if asked.layer is None else "site"
        raise SpecError(missing, "the SAE has no hook point; give both `layer` and `site`")
    (read,) = find_taps(asked.layers, asked.sites, shape, "layer", "site")
    keys = tuple((feature, feature + 1) for feature in asked.features)
    size = 2 * asked.top + len(keys) + 1
    pattern = Pattern("features", size, keys, (), (read,), (1,))
    return ResolvedCapture(((f"{FEATURES}.{asked.name}", read[1]),), where, source, pattern)
