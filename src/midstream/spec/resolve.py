"""A plan, checked against a model and a prompt and made concrete."""

from __future__ import annotations

from midstream.errors import SpecError
from midstream.sites import BY_NAME
from midstream.spec.capture import Capture
from midstream.spec.fields import at
from midstream.spec.plan import Plan
from midstream.spec.ranges import Ranges
from midstream.spec.resolved import ResolvedCapture, ResolvedEdit, ResolvedPlan, Tap
from midstream.spec.selecting import MAX_RANGES, select
from midstream.spec.shape import ModelShape
from midstream.spec.steer import Steer


def resolve(plan: Plan, shape: ModelShape, prompt_len: int, max_tokens: int | None) -> ResolvedPlan:
    """What the plan asks for, of this model, for this prompt.

    Args:
        plan: what one request asks for.
        shape: the model and its taps.
        prompt_len: P, in tokens, at least 1.
        max_tokens: most tokens that may be generated, at least 1; None: unknown.

    Raises:
        SpecError: the model has no such layer, a site is not tapped, a vector is not as wide as
            the model, or nothing is selected. The path is that in `plan.to_dict()`.
    """
    for name, value in (("prompt_len", prompt_len), ("max_tokens", max_tokens)):
        if value is not None and value < 1:
            raise SpecError(name, f"expected at least 1, got {value}")
    room = MAX_RANGES
    captures = []
    for index, capture in enumerate(plan.captures):
        with at(f"capture[{index}]"):
            ranges, last_from = select(capture.positions, prompt_len, max_tokens)
            captures.append(ResolvedCapture(_capture_taps(capture, shape), ranges, last_from))
            room = _take(room, ranges)
    edits = []
    for index, edit in enumerate(plan.edits):
        with at(f"edits[{index}]"):
            edits.append(_resolve_edit(edit, shape, prompt_len, max_tokens))
            room = _take(room, edits[-1].ranges)
    return ResolvedPlan(prompt_len, tuple(edits), tuple(captures))


def _take(room: int, ranges: Ranges) -> int:
    if len(ranges) > room:
        raise SpecError(
            "positions",
            f"the plan selects more than {MAX_RANGES} separate ranges of positions; use steps of 1",
        )
    return room - len(ranges)


def _resolve_edit(
    edit: Steer, shape: ModelShape, prompt_len: int, max_tokens: int | None
) -> ResolvedEdit:
    with at("layer"):
        layer = _layer(edit.layer, shape)
    _check_tapped((edit.site, layer), shape, site_path="site", layer_path="layer")
    if edit.vector.size != shape.hidden_size:
        raise SpecError(
            "vector",
            f"expected {shape.hidden_size} numbers, the model's hidden size, got "
            f"{edit.vector.size}",
        )
    ranges, _ = select(edit.positions, prompt_len, max_tokens)
    return ResolvedEdit(edit.site, layer, edit.vector, edit.scale, ranges)


def _capture_taps(capture: Capture, shape: ModelShape) -> tuple[Tap, ...]:
    indices, names = capture.layers.indices, capture.sites.names
    taps: list[Tap] = []
    if indices == "all":
        for place, site in enumerate(names):
            layers = shape.tapped_layers(site)
            if not layers:
                raise SpecError(_element("sites", place, len(names)), _why_nowhere(site, shape))
            taps.extend((site, layer) for layer in layers)
    else:
        chosen: dict[int, int] = {}
        for place, index in enumerate(indices):
            layer_path = _element("layers", place, len(indices))
            with at(layer_path):
                layer = _layer(index, shape)
                if layer in chosen:
                    raise SpecError(
                        "", f"layer {index} is layer {chosen[layer]} again, of {shape.num_layers}"
                    )
            chosen[layer] = index
            for nth, site in enumerate(names):
                site_path = _element("sites", nth, len(names))
                _check_tapped((site, layer), shape, site_path, layer_path)
                taps.append((site, layer))
    return tuple(sorted(taps, key=lambda tap: (tap[1], BY_NAME[tap[0]].order)))


def _layer(index: int, shape: ModelShape) -> int:
    """The layer counted from 0."""
    count = shape.num_layers
    if not -count <= index < count:
        raise SpecError(
            "",
            f"layer {index} is out of range: the model has {count} layers, 0 to {count - 1} "
            f"(or −{count} to −1)",
        )
    return index % count


def _check_tapped(tap: Tap, shape: ModelShape, site_path: str, layer_path: str) -> None:
    if tap in shape.taps:
        return
    site, layer = tap
    reason = shape.reason(tap)
    if reason is not None:
        raise SpecError(layer_path, f"{site} at layer {layer} cannot be tapped: {reason}")
    layers = shape.tapped_layers(site)
    if not layers:
        raise SpecError(site_path, _not_tapped(f"{site} at layer {layer}"))
    raise SpecError(layer_path, _not_tapped(f"{site} at layer {layer}"))


def _why_nowhere(site: str, shape: ModelShape) -> str:
    reasons = [shape.reason((site, layer)) for layer in range(shape.num_layers)]
    if None in reasons:
        return _not_tapped(f"{site} at any layer")
    return f"{site} cannot be tapped at any layer: {reasons[0]}"


def _not_tapped(what: str) -> str:
    return (
        f"{what} is not tapped; add it to the settings `sites`/`layers` of midstream "
        '(additional_config={"midstream": {"sites": [...], "layers": ...}})'
    )


def _element(name: str, index: int, length: int) -> str:
    """Where an element is: without an index if it is the only one, which may stand alone."""
    return name if length == 1 else f"{name}[{index}]"
