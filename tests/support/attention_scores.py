"""Cases of the kernel of attention scores, and the comparison with PyTorch."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream.runtime.worker.readouts import weights
from midstream.runtime.worker.readouts.scores_kernel import scores_triton
from midstream.runtime.worker.readouts.weights import AttentionForm
from support.nightly import NIGHTLY

HEADS, GROUPS = 6, 3
SHAPES = [(1, 1, 16), (3, 1, 24), (1, 5, 80), (1, 37, 64), (2, 1, 128)]  # runs, rows, head_dim
FORMS = {
    "plain": AttentionForm(0.3),
    "window": AttentionForm(0.3, window=9),
    "soft cap": AttentionForm(0.5, soft_cap=1.5, window=40),
    "ALiBi": AttentionForm(0.2, slopes=torch.linspace(0.5, 0.01, HEADS)),
}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Case:
    """Queries and a paged cache, whose unused numbers are NaN."""

    queries: Tensor  # [runs, rows, heads, head_dim], a view with gaps
    positions: Tensor  # int64 [runs, rows]
    keys: Tensor  # [blocks, tokens, key-value heads, head_dim], a view of a cache with values
    table: Tensor  # int32 [requests, blocks]
    requests: Tensor  # int64 [runs]
    key_heads: Tensor  # int64 [heads]
    begin: int  # positions of the keys
    stop: int
    form: AttentionForm  # what attention does

    def found(self) -> Tensor:
        """What the kernel returns."""
        form, shape = self.form, (*self.queries.shape[:3], self.stop - self.begin)
        out = torch.empty(shape, device=self.queries.device)
        scores_triton(
            self.queries, self.positions, self.keys, self.table, self.requests, self.key_heads,
            self.begin, self.stop, out, scale=form.scale, soft_cap=form.soft_cap,
            window=form.window, slopes=form.slopes,
        )  # fmt: skip
        return out

    def expected(self) -> Tensor:
        """What PyTorch computes."""
        size = self.keys.shape[1]

        def read(first: int, last: int) -> Tensor:
            blocks = self.table[self.requests, first // size : -(-last // size)]
            found = self.keys[blocks].flatten(1, 2)
            return found[:, first % size : first % size + last - first]

        return weights.scores(
            weights.Queries(self.queries, self.positions, self.key_heads),
            read,
            range(self.begin, self.stop, size * 3),
            self.form,
        )

    def check(self, name: str) -> None:
        """Both are equal, to the rounding of float32 sums."""
        found, expected = self.found(), self.expected()
        assert torch.equal(found.isinf(), expected.isinf()), name
        error = (found - expected).nan_to_num().abs().max()
        assert float(error) <= 2e-5 * float(expected[expected.isfinite()].abs().max()) + 1e-6, (
            f"{name}: {float(error)}"
        )


def make(
    runs: int,
    rows: int,
    dim: int,
    form: AttentionForm,
    dtype: torch.dtype,
    device: str,
    seed: int,
    stored: torch.dtype | None = None,
) -> Case:
    """Random numbers; each run is of another request. Keys are stored in another format if one is
    given.
    """
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype).to(device)

    size, blocks = 16, 9
    lowest = torch.randint(0, size * blocks - rows, (runs, 1), generator=draw)
    positions = lowest + torch.arange(rows)
    stop = int(positions.max()) + 1
    begin = max(0, int(positions.min()) - form.window + 1) if form.window else 0
    cache = random(runs * blocks + 1, 2, size, GROUPS, dim)
    table = 1 + torch.randperm(runs * blocks, generator=draw).view(runs, blocks).int()
    flat = cache[:, 0]
    flat[0] = torch.nan
    for request in range(runs):  # of what comes after the last key, anything
        last = int(positions[request].max())
        tail = table[request, last // size]
        flat[tail, last % size + 1 :] = torch.nan
        flat[table[request, last // size + 1 :].long().to(device)] = torch.nan
    if stored is not None:
        flat = flat.to(stored)
    heads = torch.tensor([5, 0, 3]) if seed % 3 == 0 else torch.arange(HEADS)
    slopes = None if form.slopes is None else form.slopes[heads].to(device)
    form = AttentionForm(form.scale, form.soft_cap, form.window, slopes)
    queries = random(runs, rows, len(heads), dim + 8)[..., :dim]
    key_heads = (heads // (HEADS // GROUPS)).to(device)
    requests = torch.randperm(runs, generator=draw)
    return Case(
        queries, positions[requests].contiguous().to(device), flat, table.to(device),
        requests.to(device), key_heads, begin, stop, form,
    )  # fmt: skip


def cases(device: str, dtypes: Any) -> Iterator[tuple[str, Case]]:
    """Each combination once, by name."""
    for seed, (shape, name, dtype) in enumerate(itertools.product(SHAPES, FORMS, dtypes)):
        yield f"{shape} {name} {dtype}", make(*shape, FORMS[name], dtype, device, seed)
    for seed, (stored, dtype) in enumerate(itertools.product(FP8, dtypes)):
        case = make(*SHAPES[seed % 3], FORMS["window"], dtype, device, seed, stored)
        yield f"{stored} {dtype}", case


def check_without_a_gpu() -> int:
    """Check the cases in Triton's interpreter, which has no bfloat16 products; return how many.

    By default each shape and each form has one dtype; at night each has both.
    """
    dtypes = (torch.float32, torch.float16)
    checked = 0
    for nth, (name, case) in enumerate(cases("cpu", dtypes)):
        chosen = sum(divmod(nth // len(dtypes), len(FORMS))) % len(dtypes)
        if NIGHTLY or nth % len(dtypes) == chosen:
            case.check(name)
            checked += 1
    return checked
