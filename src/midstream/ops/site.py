"""`torch.ops.midstream.site`: edits and captures one site's rows, in the graph.

The op is opaque to Dynamo and Inductor and declares what it mutates, so that it is kept, in
order and in place, whatever compiles the model around it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from midstream.ops import layout
from midstream.ops.site_ref import site_ref

_SCHEMA = (
    "site(Tensor(a!) hidden, Tensor? residual, Tensor tokens, Tensor(b!) tally, Tensor table, "
    "Tensor edit_rows, Tensor edit_scales, Tensor bank, Tensor(c!) ring) -> ()"
)


def site(
    hidden: Tensor,
    residual: Tensor | None,
    tokens: Tensor,
    tally: Tensor,
    table: Tensor,
    edit_rows: Tensor,
    edit_scales: Tensor,
    bank: Tensor,
    ring: Tensor,
) -> None:
    """Applies each token's edits at one site, then captures its vector there.

    For each row t with `tokens[t, PROGRAM] != 0`: with h = hidden[t] in float32,
    h += scale · bank[row] for each edit of its program at this site, in order, rounded once into
    `hidden[t]`; then, if the token has a record and its group captures this site,
    `ring[...] = hidden[t] + residual[t]`; then `tally[t]` counts what was done. An edit at a site
    is therefore in that site's capture, and is seen by all that reads `hidden` afterwards.

    Args:
        hidden: [T, H], the stream, or the half of it that is edited. Mutated.
        residual: [T, H] or None, the other half: the stream is the sum of both.
        tokens: int32 [≥ T, 4], see `midstream.ops.layout`.
        tally: int32 [≥ T, 4]. Mutated.
        table: int32 [rows, 4], this site's.
        edit_rows: int32 [E], the bank's row of each edit.
        edit_scales: float32 [E].
        bank: float32 [V, H], the vectors.
        ring: [R, H], where captured vectors go. Mutated.

    Raises:
        ValueError: a shape, stride or dtype is not as above.
    """
    if not hidden.is_cuda and not bool(tokens[: hidden.shape[0], layout.PROGRAM].any()):
        # Nobody asks for anything: on a CPU, where nothing is replayed, that is most of the cost.
        return
    _check(hidden, residual, tokens, tally, table, edit_rows, edit_scales, bank, ring)
    if hidden.is_cuda:
        from midstream.ops.site_triton import site_triton

        site_triton(hidden, residual, tokens, tally, table, edit_rows, edit_scales, bank, ring)
    else:
        site_ref(hidden, residual, tokens, tally, table, edit_rows, edit_scales, bank, ring)


def _check(
    hidden: Tensor,
    residual: Tensor | None,
    tokens: Tensor,
    tally: Tensor,
    table: Tensor,
    edit_rows: Tensor,
    edit_scales: Tensor,
    bank: Tensor,
    ring: Tensor,
) -> None:
    if hidden.dim() != 2 or hidden.stride(1) != 1:
        raise ValueError(f"hidden must be [T, H] with contiguous rows, got {_seen(hidden)}")
    if residual is not None and (residual.shape != hidden.shape or residual.stride(1) != 1):
        raise ValueError(f"residual must be as hidden {_seen(hidden)}, got {_seen(residual)}")
    num_rows, width = hidden.shape
    for name, words, columns in (
        ("tokens", tokens, layout.TOKEN_COLUMNS),
        ("tally", tally, layout.TALLY_COLUMNS),
    ):
        if words.shape[0] < num_rows or words.shape[1:] != (columns,):
            raise ValueError(
                f"{name} must be [≥ {num_rows}, {columns}], got {_seen(words)}: "
                "more rows came than the engine was set up for"
            )
    if bank.shape[1] != width or ring.shape[1] != width:
        raise ValueError(f"bank and ring must be {width} wide, got {_seen(bank)} and {_seen(ring)}")
    for name, buffer, dtype in (
        ("tokens", tokens, torch.int32),
        ("tally", tally, torch.int32),
        ("table", table, torch.int32),
        ("edit_rows", edit_rows, torch.int32),
        ("edit_scales", edit_scales, torch.float32),
        ("bank", bank, torch.float32),
    ):
        if buffer.dtype != dtype or not buffer.is_contiguous():
            raise ValueError(f"{name} must be contiguous {dtype}, got {_seen(buffer)}")
    if not ring.is_contiguous():
        raise ValueError(f"ring must be contiguous, got {_seen(ring)}")


def _seen(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()}"


def _fake(*_args: Tensor | None) -> None:
    """Nothing is returned, so there is no shape to infer."""


def _define() -> None:
    library = torch.library.Library("midstream", "DEF")
    library.define(_SCHEMA)
    library.impl("site", site, "CPU")
    library.impl("site", site, "CUDA")
    torch.library.register_fake("midstream::site", _fake, lib=library)
    # A library that is collected takes its op with it.
    _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []
_define()
