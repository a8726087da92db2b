"""Resolution of a `Lens` against a model and a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midstream.errors import SpecError
from midstream.spec.lens import Lens
from midstream.spec.positions.position_set import Where
from midstream.spec.resolve.resolved import Pattern, ResolvedCapture, ResolvedPlan
from midstream.spec.resolve.tap_lookup import find_taps
from midstream.spec.shape import ModelShape
from midstream.spec.tokens import known_ids

LENS = "lens"
# Kinds of results that have names.
_WORDS = {"lens": "a lens", "features": "a `Features`"}


def resolve_lens(lens: Lens, source: int, where: Where, shape: ModelShape) -> ResolvedCapture:
    """Resolve a `Lens` whose tokens are ids.

    Args:
        source: its index in the plan.
    """
    reason = shape.reason((LENS, shape.num_layers - 1))
    if reason is not None:
        raise SpecError("", f"the stream cannot be decoded: {reason}")
    reads = find_taps(lens.layers, lens.sites, shape, "layers", "site")
    tokens = known_ids(lens.tokens)
    size = 2 * lens.top + 2 * len(tokens) + 1
    # In the given order, unlike other ranges.
    keys = tuple((token, token + 1) for token in tokens)
    taps = tuple((f"{LENS}.{lens.name}", layer) for _, layer in reads)
    pattern = Pattern("lens", size, keys, (), reads, (1,) * len(reads))
    return ResolvedCapture(taps, where, source, pattern)


def check_names(captures: Sequence[ResolvedCapture]) -> None:
    """Check that no two lenses have one name, and no two read-outs of SAEs."""
    seen: dict[str, int] = {}
    for capture in captures:
        if capture.pattern is None or capture.pattern.kind not in _WORDS:
            continue
        other = seen.setdefault(capture.taps[0][0], capture.source)
        if other != capture.source:
            raise SpecError(
                f"capture[{capture.source}].name",
                f"capture[{other}] is {_WORDS[capture.pattern.kind]} of this name too; give one of "
                "them another `name`",
            )


def lenses_of(plan: ResolvedPlan) -> list[ResolvedCapture]:
    """Return the lenses among the captures of a plan."""
    return [
        capture
        for capture in plan.captures
        if capture.pattern is not None and capture.pattern.kind == "lens"
    ]


def check_lenses(plan: ResolvedPlan, vllm_config: Any) -> None:
    """Check that the engine can carry out the lenses of a plan."""
    for capture in lenses_of(plan):
        path = f"capture[{capture.source}]"
        vocabulary = int(vllm_config.model_config.get_vocab_size())
        pattern = capture.pattern
        assert pattern is not None
        for token_index, (token, _) in enumerate(pattern.keys):
            if token >= vocabulary:
                raise SpecError(
                    f"{path}.tokens[{token_index}]",
                    f"there is no token {token}: the model has {vocabulary}, 0 to {vocabulary - 1}",
                )
        if pattern.size > 2 * vocabulary + 2 * len(pattern.keys) + 1:
            raise SpecError(f"{path}.top", f"the model has {vocabulary} tokens")
