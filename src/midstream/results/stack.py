"""Captured vectors of several prompts in one tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from midstream.errors import SpecError
from midstream.plan.selection import read_taps
from midstream.results.activations import Activations
from midstream.results.arrays import show_size, stack_arrays
from midstream.sites import ENDS
from midstream.validation import kind, read_int

if TYPE_CHECKING:
    from torch import Tensor


def stack(
    outputs: Iterable[Any], site: object = None, layers: object = None, row: object = None
) -> Tensor:
    """Return the captured vectors of several prompts, [prompts, layers, rows, hidden], or of
    attention heads [prompts, layers, rows, heads, head_dim].

    Args:
        outputs: outputs of `generate` or `chat`, completions, or Activations; one per prompt.
        site: a site in any spelling; None: the one that was captured.
        layers: any form of Layers; None or "all": all that were captured, ascending.
        row: index of one captured row, −1 for the last; the result is then [prompts, layers,
            hidden], without rows. None: all rows, whose number must be the same for all prompts.

    Returns:
        A tensor in the dtype of the captured vectors; an array of NumPy without torch.

    Raises:
        SpecError: an output has no activations, or not these, or the numbers of rows differ.
    """
    if not hasattr(outputs, "__iter__") or isinstance(outputs, Activations):
        raise SpecError("outputs", f"expected a list of outputs, got {kind(outputs)}")
    activations = [_activations_of(index, output) for index, output in enumerate(outputs)]
    if not activations:
        raise SpecError("outputs", "expected at least one output")
    chosen, sites = read_taps(layers, site, "layers", "site")
    if sites is None and len(activations[0].sites) != 1:
        raise SpecError(
            "site", f"give one of the captured: {', '.join(activations[0].sites) or 'none'}"
        )
    names = activations[0].sites if sites is None else sites.names
    if len(names) != 1:
        raise SpecError("site", f"expected one site, got {len(names)}")
    indices = activations[0].layers
    if chosen is not None and chosen.indices != "all":
        indices = chosen.indices
    site_keys = [(names[0], layer) for layer in indices]
    keys: list[Any] = [names[0]] if names[0] in ENDS else site_keys
    nth_row = None if row is None else read_int(row)
    stacked: list[Any] = []
    for index, captured in enumerate(activations):
        try:
            values = [captured[key] for key in keys]
            if nth_row is not None:
                values = [value[nth_row] for value in values]
        except (KeyError, IndexError) as error:
            raise SpecError(f"outputs[{index}]", str(error.args[0])) from None
        shapes = {tuple(value.shape) for value in values}
        first_dim = 1 if nth_row is None else 0
        sizes = {shape[first_dim:] for shape in shapes}
        sizes |= {tuple(tensor.shape[1 + first_dim :]) for tensor in stacked}
        if len(sizes) > 1:
            shown = ", ".join(map(show_size, sorted(sizes)))
            raise SpecError(
                f"outputs[{index}]",
                f"its vectors differ in width from layer to layer or from others: {shown}, which "
                "no tensor can have; give `layers` of one width",
            )
        first = tuple(stacked[0].shape[1:]) if stacked else tuple(values[0].shape)
        if shapes != {first}:
            shown = ", ".join(str(shape[0]) for shape in sorted(shapes))
            raise SpecError(
                f"outputs[{index}]",
                f"has {shown} rows where others have {first[0]}, which no tensor can have; give "
                'row=-1 for one row of each, or capture as many, as positions="last_prompt" does',
            )
        stacked.append(stack_arrays(values))
    result: Tensor = stack_arrays(stacked)
    return result


def _activations_of(index: int, output: Any) -> Activations:
    activations = (
        output if isinstance(output, Activations) else getattr(output, "activations", None)
    )
    if isinstance(activations, Activations):
        return activations
    problem = "has no activations; give generate a `capture`"
    if len(getattr(output, "outputs", ())) > 1:
        problem = "has several completions; give these, its `outputs`, in its place"
    raise SpecError(f"outputs[{index}]", problem)
