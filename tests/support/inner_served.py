"""A model with all inner sites in an engine, beside its reference; what its rows must be."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from midstream import Capture
from support import tiny
from support.engines import HAS_GPU, generated, greedy, tokens
from support.inner_cases import END, SPECS
from support.inner_oracle import INNER, InnerOracle, largest_error, rows_of
from support.oracle_edits import Seen, row_error

TOLERANCE = 5e-4 if HAS_GPU else 1e-4  # a GPU sums in its own order
TIE = 5e-3 if HAS_GPU else 1e-3
BLOCK = 32
PROMPTS = [
    [5, 17, 33, 101, 8, 77, 54, 23, 9],
    [150, 44, 12, 13, 99, 180, 64],
    [3, 70, 71, 120, 66, 14, 190, 31, 57, 88, 142, 6, 25, 111, 39, 160, 81],
]
ROOM = {"max_num_batched_tokens": 64, "max_num_seqs": 32, "block_size": BLOCK}


@dataclass(frozen=True)
class Served:
    """One architecture: the reference, and an engine."""

    name: str
    oracle: InnerOracle
    llm: Any

    def ask(self, prompts: Sequence[list[int]], count: int = 4, **asked: Any) -> list[Any]:
        asked.setdefault("capture", Capture("all", (*self.oracle.sites, END)))
        params = asked.pop("params", None) or greedy(count, logprobs=2, detokenize=False)
        return self.llm.generate([tokens(one) for one in prompts], params, use_tqdm=False, **asked)

    def assert_is(self, prompt: list[int], output: Any, *edits: Any) -> Seen:
        """An output is the reference's, which knows its tokens; each edit is an `At`."""
        for one in output.outputs:
            seen = self.oracle.run([*prompt, *one.token_ids][:-1], edits)
            assert_rows(getattr(one, "activations", None) or output.activations, seen)
        for row, token in zip(seen.logits[len(prompt) - 1 :], generated(output), strict=True):
            assert float(row.max() - row[token]) <= TIE, "another token"
        return seen

    def vector(self, site: str, layer: int, part: bool, seed: int = 3) -> Tensor:
        """For a site or one of its heads, twice as long as what is there."""
        rows = self.oracle.run(PROMPTS[2]).values[site, layer]
        rows = rows[:, : self.oracle.head_dim] if part else rows
        v = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(seed))
        return v * (2 * float(rows.norm(dim=-1).median()) / v.norm())


def assert_rows(found: Any, seen: Seen) -> None:
    assert len(found)
    for tap, value in found.items():
        expected = seen.values[tap][found.positions_of(*tap)]
        error = max(largest_error(value, expected), row_error(rows_of(value), expected))
        assert error <= TOLERANCE, f"{tap}: {error:.2e}"


def reference(name: str, folder: Path, kind: str = "") -> tuple[Path, InnerOracle]:
    """A model of an architecture, and the reference; `kind`: another one in `SPECS`."""
    # vLLM changes transformers' own classes for some models: the reference comes first.
    path = tiny.make(f"{kind or name}-inner", folder, SPECS[kind or name])
    return path, InnerOracle(path, INNER[name])


def settings(oracle: InnerOracle, folder: Path) -> dict[str, Any]:
    sinks = {kind: {"root": str(folder / kind)} for kind in ("store", "npz")}
    return {**ROOM, "midstream": {"sites": [*oracle.sites, END], "sinks": sinks, "maps": 4}}
