"""`torch.ops.midstream.site`: edits, probes and captures the tokens of a site."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from midstream.ops import layout
from midstream.ops.sae.reference import SaeBuffers
from midstream.ops.scan.reference import scan_ref
from midstream.ops.site_ref import site_ref

_SCHEMA = (
    "site(Tensor(a!) hidden, Tensor(b!)? residual, Tensor table, Tensor(c!) tally,"
    " int? start=None) -> ()"
)
_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
Before = Callable[[int, Tensor, Tensor | None], None]


@dataclass(eq=False, kw_only=True)
class SiteBuffers:
    """Tensors of the op that do not move; `bank` and `ring` have units of U numbers."""

    tokens: Tensor  # int32 [T, 4], program, group, record and position of each row
    ids: Tensor  # int32 [T, 2], token ids and bits; set where an instruction reads them
    tally: Tensor  # int32 [T, 4 + n], counts of the work done for each row, and n doses of edits
    instructions: Tensor  # int32 [E, 8]
    params: Tensor  # float32 [E, 4]
    lists: Tensor  # int32 [L], token ids of the instructions
    bank: Tensor  # float32 [V, U], the vectors
    scores: Tensor  # float32 [T, P]
    ring: Tensor  # [R, U] in the model's dtype, vectors until they are copied to the host
    mapped: Tensor  # float32 [T, hidden], what MAPs make of rows; no row without, or on a CPU
    scans: Tensor  # int32 [G, 4], the rows of SCANs in a step
    scan_states: Tensor  # int32 [G, n, 3], what they remember, after the last n positions
    sae: SaeBuffers | None  # None: there is no CODE
    encoding: frozenset[int]  # addresses of the tables of sites where there may be CODEs
    widths: dict[int, int] = field(default_factory=dict)  # of vectors, by address of the table
    # By the same and the kind of a stream, what launches the kernel again: see `Relaunch`.
    relaunches: dict[int, dict[Hashable, Any]] = field(default_factory=dict)
    # Called with an address and both halves before edits of rows, where no graph is replayed.
    before: Before | None = None


# By the address of a site's table. Buffers that nobody uses any more leave it.
_BUFFERS: WeakValueDictionary[int, SiteBuffers] = WeakValueDictionary()


def bind(table: Tensor, buffers: SiteBuffers, width: int) -> None:
    """Let the op use some buffers, which the caller keeps alive, wherever it is called with this
    table of one site, int32 [programs, 4], which must not move. `width` is that of its vectors.
    """
    _check_buffers(table, buffers)
    unit = buffers.bank.shape[1]
    if width < 1 or width % unit:
        raise ValueError(f"width must be a multiple of {unit}, the buffers' unit, got {width}")
    _BUFFERS[table.data_ptr()] = buffers
    buffers.relaunches[table.data_ptr()] = {}
    buffers.widths[table.data_ptr()] = width


def site(
    hidden: Tensor,  # [T, W], the stream, one half of it, or another value of the model; mutated
    residual: Tensor | None,  # [T, W], the other half: the stream is the sum of both; mutated
    table: Tensor,  # int32 [programs, 4], of this site, which `bind` was called with
    tally: Tensor,  # that of its buffers; mutated: compilers keep the order of calls for that
    # First of W columns of a wider `hidden`, without `residual`: of a view of them Inductor makes
    # wrong code (seen with torch 2.13 on a CPU).
    start: int | None = None,
) -> None:
    """Run each token's program at one site, then capture its vector.

    For each row t with `tokens[t, PROGRAM] != 0`, in float32:

    1. Run the program's instructions at this site in order; see `midstream.ops.layout`. The stream
       is hidden + residual + delta, where delta accumulates what instructions add; one that
       replaces h computes the stream itself. The row is then written once: as `residual[t] =
       round(row)` and `hidden[t] = round(row − residual[t])`, as exact as two numbers of the dtype
       can be, or as `hidden[t] = round(row)` if there is no residual. A zero is zero in both.
       A changed value saturates at `layout.limit_of` the dtype (in float16, or where it was on
       entry if that is farther), and NaN becomes 0, so an edit writes finite values only.
       A component that no instruction changes (a scale of zero, a clip out of reach, a closed gate,
       +v then −v) keeps every bit of both halves; in bfloat16 a NaN may become another NaN.
    2. If the token has a record and its group captures this site, `ring[...] = hidden[t] +
       residual[t]`: captures include the edits at the same site.
    3. Add the counts of this site to `tally[t]`. `NONFINITE` is set to 1 if a changed value
       saturated, or if an edited row, a captured row or a probe's score is not finite. An
       instruction that changes h and has a `SLOT` stores the dose of its edit, see `layout.DOSES`.

    A MAP, CODE or SCAN reads the stream on entry: it comes before all that changes h. The h that
    instructions read is the stream at the last one with `Flags.FRESH`; before the first, the stream
    on entry. A factor of exactly zero contributes exactly nothing. `GATED` and `KEEP` apply only to
    instructions that add to the stream. The order of sums depends on the implementation. Mutates
    `scores`, `scan_states` and `ring` of the buffers too.
    """
    address = table.data_ptr()
    buffers = _BUFFERS.get(address)
    if buffers is None:
        raise ValueError(
            "the table of this site is not bound to buffers, or these are gone: a copy of a tapped "
            "module has no taps of its own"
        )
    kind = None
    if hidden.is_cuda:
        if start is None and buffers.before is None:
            kind = _on_gpu().kind_of(hidden, residual)
        again = buffers.relaunches[address].get(kind)
        if again is not None and again(hidden, residual, tally):
            return
    elif not buffers.tokens[: hidden.shape[0], layout.PROGRAM].numpy().any():
        # All tokens are idle. Returning early is safe on a CPU, where no graph is replayed, and
        # saves most of the cost.
        return
    width = buffers.widths[address]
    if start is not None:
        if residual is not None or not 0 <= start <= hidden.shape[1] - width:
            raise ValueError(
                f"start must be from 0 to {hidden.shape[1] - width}, without a residual, for "
                f"{width} columns of {_describe(hidden)}, got {start}"
            )
        hidden = hidden[:, start : start + width]
    _check_rows(hidden, residual, buffers.tokens.shape[0], width)
    if buffers.before is not None:
        buffers.before(address, hidden, residual)
    if tally.shape != buffers.tally.shape or tally.dtype != torch.int32:
        raise ValueError(
            f"tally must be that of the buffers, {_describe(buffers.tally)}, got {_describe(tally)}"
        )
    common = (
        hidden, residual, buffers.tokens, buffers.ids, tally, table, buffers.instructions,
        buffers.params, buffers.lists, buffers.bank, buffers.scores,
    )  # fmt: skip
    rest = buffers.ring, buffers.mapped, buffers.sae, address in buffers.encoding
    scans = buffers.scans, buffers.scan_states
    has_scans = buffers.scans.shape[0] > 0
    if not hidden.is_cuda:
        if has_scans:
            scan_ref(*common, *scans)
        site_ref(*common, *rest)
        return
    if has_scans:
        from midstream.ops.scan.launch import scan_triton

        scan_triton(*common, *scans)
    made = _on_gpu().site_triton(*common, *rest)
    if made is not None and kind is not None and not has_scans:
        buffers.relaunches[address][kind] = made


@cache
def _on_gpu() -> Any:
    """Return the module that launches the kernels; Triton may be missing where there is no GPU."""
    from midstream.ops import site_triton

    return site_triton


def _check_rows(hidden: Tensor, residual: Tensor | None, rows: int, width: int) -> None:
    if hidden.dim() != 2 or hidden.stride(1) != 1:
        raise ValueError(f"hidden must be [T, W] with contiguous rows, got {_describe(hidden)}")
    if hidden.dtype not in _DTYPES:
        raise ValueError(f"hidden must be float32, bfloat16 or float16, got {_describe(hidden)}")
    if hidden.shape[1] != width:
        raise ValueError(f"hidden must be {width} wide at this site, got {_describe(hidden)}")
    if hidden.shape[0] > rows:
        raise ValueError(
            f"hidden must have at most {rows} rows, the engine's maximum number of tokens, "
            f"got {_describe(hidden)}"
        )
    if residual is not None and (residual.shape != hidden.shape or residual.stride(1) != 1):
        raise ValueError(
            f"residual must match hidden, {_describe(hidden)}, got {_describe(residual)}"
        )


def _check_buffers(table: Tensor, buffers: SiteBuffers) -> None:
    rows, instructions = buffers.tokens.shape[0], buffers.instructions.shape[0]
    unit = buffers.bank.shape[-1]
    int32, float32 = torch.int32, torch.float32
    for name, tensor, dtype, shape in (
        ("tokens", buffers.tokens, int32, (rows, layout.TOKEN_COLUMNS)),
        ("ids", buffers.ids, int32, (rows, layout.ID_COLUMNS)),
        ("tally", buffers.tally, int32, (rows, max(buffers.tally.shape[-1], layout.TALLY_COLUMNS))),
        ("table", table, int32, (table.shape[0], layout.TABLE_COLUMNS)),
        ("instructions", buffers.instructions, int32, (instructions, layout.INSTRUCTION_COLUMNS)),
        ("params", buffers.params, float32, (instructions, layout.PARAM_COLUMNS)),
        ("lists", buffers.lists, int32, (buffers.lists.numel(),)),
        ("bank", buffers.bank, float32, (buffers.bank.shape[0], unit)),
        ("scores", buffers.scores, float32, (rows, buffers.scores.shape[-1])),
        ("ring", buffers.ring, buffers.ring.dtype, (buffers.ring.shape[0], unit)),
        ("scans", buffers.scans, int32, (buffers.scans.shape[0], layout.SCAN_COLUMNS)),
        (
            "scan_states",
            buffers.scan_states,
            int32,
            (buffers.scans.shape[0], buffers.scan_states.shape[1], layout.STATE_COLUMNS),
        ),
        ("mapped", buffers.mapped, float32, (buffers.mapped.shape[0], buffers.mapped.shape[-1])),
    ):
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {dtype} {shape}, got {_describe(tensor)}")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()}"


# A global, as garbage collection of a library would remove its ops.
_LIBRARY = torch.library.Library("midstream", "DEF")
_LIBRARY.define(_SCHEMA)
_LIBRARY.impl("site", site, "CPU")
_LIBRARY.impl("site", site, "CUDA")
# The op returns nothing, so there is no shape to infer.
torch.library.register_fake("midstream::site", lambda *_args: None, lib=_LIBRARY)
