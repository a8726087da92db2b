"""`torch.ops.midstream.site`: the op that edits, probes and captures the tokens at one site.

The op is opaque to Dynamo and Inductor and declares its mutations, so compilers of the model keep
it, in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from midstream.ops import layout
from midstream.ops.site_ref import site_ref

_SCHEMA = (
    "site(Tensor(a!) hidden, Tensor? residual, Tensor tokens, Tensor ids, Tensor(b!) tally, "
    "Tensor table, Tensor instructions, Tensor params, Tensor lists, Tensor bank, "
    "Tensor(c!) scores, Tensor(d!) ring) -> ()"
)


def site(
    hidden: Tensor,
    residual: Tensor | None,
    tokens: Tensor,
    ids: Tensor,
    tally: Tensor,
    table: Tensor,
    instructions: Tensor,
    params: Tensor,
    lists: Tensor,
    bank: Tensor,
    scores: Tensor,
    ring: Tensor,
) -> None:
    """Run each token's program at one site, then capture its vector.

    For each row t with `tokens[t, PROGRAM] != 0`, in float32:

    1. Run the program's instructions at this site in order; see `midstream.ops.layout`.
       The stream is hidden + residual + delta, where delta starts at zero and accumulates the
       instructions' contributions; it is rounded once, into `hidden[t] = hidden[t] + delta`.
       A changed value saturates at `layout.limit_of` the dtype, and NaN becomes 0, so an edit
       never writes a value that is not finite.
       Instructions without an effect (a scale of zero, a clip out of reach, a closed gate, +v then
       −v) therefore leave every bit of `hidden[t]` unchanged.
    2. If the token has a record and its group captures this site, `ring[...] = hidden[t] +
       residual[t]`: captures include the edits at the same site.
    3. Add the counts of this site to `tally[t]`. `NONFINITE` is set to 1 if a changed value
       saturated, or if an edited row, a captured row or a probe's score is not finite.

    The h that instructions read is the stream at the last instruction with `Flags.FRESH`; before
    the first of these, the stream on entry. A factor of exactly zero contributes exactly nothing.
    `GATED` and `KEEP` apply only to instructions that add to the stream. Inner products are summed
    in float32, in an order that depends on the implementation.

    Args:
        hidden: [T, H], the stream, or the half of it that is edited. Mutated.
        residual: [T, H] or None, the other half: the stream is the sum of both.
        tokens: int32 [≥ T, 4], see `midstream.ops.layout`.
        ids: int32 [≥ T], each token's id.
        tally: int32 [≥ T, 4]. Mutated.
        table: int32 [rows, 4], the table of this site.
        instructions: int32 [E, 8].
        params: float32 [E, 4].
        lists: int32 [L], token ids.
        bank: float32 [V, H], the vectors.
        scores: float32 [≥ T, slots]. Mutated.
        ring: [R, H], destination of captured vectors. Mutated.

    Raises:
        ValueError: a shape, stride or dtype differs from the above, or H > 32768 on a GPU.
    """
    if not hidden.is_cuda and not tokens[: hidden.shape[0], layout.PROGRAM].numpy().any():
        # All tokens are idle. Returning early is safe on a CPU, where no graph is replayed, and
        # saves most of the cost.
        return
    _check_rows(hidden, residual, bank, ring)
    _check_token_buffers(hidden.shape[0], tokens, ids, tally, scores)
    _check_buffers(tokens, ids, tally, table, instructions, params, lists, bank, scores)
    run = site_ref
    if hidden.is_cuda:
        from midstream.ops.site_triton import site_triton

        run = site_triton
    run(
        hidden, residual, tokens, ids, tally, table, instructions, params, lists, bank, scores, ring
    )


def _check_rows(hidden: Tensor, residual: Tensor | None, bank: Tensor, ring: Tensor) -> None:
    if hidden.dim() != 2 or hidden.stride(1) != 1:
        raise ValueError(f"hidden must be [T, H] with contiguous rows, got {_describe(hidden)}")
    if residual is not None and (residual.shape != hidden.shape or residual.stride(1) != 1):
        raise ValueError(
            f"residual must match hidden, {_describe(hidden)}, got {_describe(residual)}"
        )
    width = hidden.shape[1]
    if bank.shape[1] != width or ring.shape[1] != width:
        raise ValueError(
            f"bank and ring must be {width} wide, got {_describe(bank)} and {_describe(ring)}"
        )
    if not ring.is_contiguous():
        raise ValueError(f"ring must be contiguous, got {_describe(ring)}")


def _check_token_buffers(
    num_rows: int, tokens: Tensor, ids: Tensor, tally: Tensor, scores: Tensor
) -> None:
    for name, buffer, columns in (
        ("tokens", tokens, (layout.TOKEN_COLUMNS,)),
        ("ids", ids, ()),
        ("tally", tally, (layout.TALLY_COLUMNS,)),
        ("scores", scores, (scores.shape[-1],)),
    ):
        if buffer.shape[0] < num_rows or buffer.shape[1:] != columns:
            expected = ", ".join(str(size) for size in (f"≥ {num_rows}", *columns))
            raise ValueError(
                f"{name} must be [{expected}], got {_describe(buffer)}: "
                "the batch exceeds the engine's maximum number of tokens"
            )


def _check_buffers(
    tokens: Tensor,
    ids: Tensor,
    tally: Tensor,
    table: Tensor,
    instructions: Tensor,
    params: Tensor,
    lists: Tensor,
    bank: Tensor,
    scores: Tensor,
) -> None:
    for name, buffer, dtype in (
        ("tokens", tokens, torch.int32),
        ("ids", ids, torch.int32),
        ("tally", tally, torch.int32),
        ("table", table, torch.int32),
        ("instructions", instructions, torch.int32),
        ("params", params, torch.float32),
        ("lists", lists, torch.int32),
        ("bank", bank, torch.float32),
        ("scores", scores, torch.float32),
    ):
        if buffer.dtype != dtype or not buffer.is_contiguous():
            raise ValueError(f"{name} must be contiguous {dtype}, got {_describe(buffer)}")
    if table.shape[1:] != (layout.TABLE_COLUMNS,):
        raise ValueError(f"table must be [rows, {layout.TABLE_COLUMNS}], got {_describe(table)}")
    count = instructions.shape[0]
    if instructions.shape[1:] != (layout.INSTRUCTION_COLUMNS,) or params.shape != (
        count,
        layout.PARAM_COLUMNS,
    ):
        raise ValueError(
            f"instructions and params must be [E, {layout.INSTRUCTION_COLUMNS}] and "
            f"[E, {layout.PARAM_COLUMNS}], got {_describe(instructions)} and {_describe(params)}"
        )


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()}"


def _fake(*_args: Tensor | None) -> None:
    """Do nothing: the op returns nothing, so there is no shape to infer."""


def _define() -> None:
    library = torch.library.Library("midstream", "DEF")
    library.define(_SCHEMA)
    library.impl("site", site, "CPU")
    library.impl("site", site, "CUDA")
    torch.library.register_fake("midstream::site", _fake, lib=library)
    # Garbage collection of a library would remove its ops.
    _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []
_define()
