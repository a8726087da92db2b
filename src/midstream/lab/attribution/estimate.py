"""`attribution_patching`: a grid of activation patches, estimated by one gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.errors import SpecError
from midstream.lab.attribution.attribution import Attribution
from midstream.lab.attribution.check import check_same_model
from midstream.lab.attribution.gradient_pass import gradient_pass, plain_pass
from midstream.lab.attribution.logit_functions import logit_function, read_with_ids
from midstream.lab.attribution.twin import Twin
from midstream.lab.sweep import Metric, Recovered, Sweep, SweepRequest
from midstream.lab.sweep.alignment import align_positions
from midstream.lab.sweep.cells import Grid, plan_grid
from midstream.lab.sweep.edits import check_sizes
from midstream.lab.sweep.job import SweepPrompt, captures_of, name_of
from midstream.lab.sweep.metrics import read_metric
from midstream.lab.sweep.source import PromptSource
from midstream.plan.forms import IndicesLike, LayersLike, NumberLike, PositionsLike, SitesLike
from midstream.plan.tap_lookup import check_tapped
from midstream.sites import Tap, order
from midstream.validation import at


def attribution_patching(
    twin: Any,
    clean: Any,
    corrupt: Any,
    metric: Any,
    *,
    layers: LayersLike = "all",
    sites: SitesLike = "resid_pre",
    positions: PositionsLike | None = None,
    exclude: PositionsLike | None = None,
    groups: Mapping[str, PositionsLike] | None = None,
    heads: IndicesLike | Literal["all"] | None = None,
    align: Any = "exact",
    alpha: NumberLike = 1.0,
    mask: Any = None,
    llm: Any = None,
) -> Attribution:
    """Estimate the metric of every patch of a sweep, from two forward passes and one backward pass.

    The metric of the corrupt prompt, patched with the clean activation at one site, layer and
    position, is about metric + (clean − corrupt) · ∂metric/∂activation, with the gradient of the
    corrupt run: Nanda 2023 (neelnanda.io/attribution-patching), Kramár et al. 2024
    (arXiv:2403.00745). It is exact where the metric is linear in the activation, and worst where it
    is not: large differences, as those of the whole stream in early layers, and `q` and `k` of a
    saturated attention. `Attribution.check` measures the largest cells.

    Args:
        twin: a Twin; or a `midstream.LLM`, whose Twin is loaded for this call and which gives the
            activations.
        clean: the prompt whose activations are put into the other: a text, token ids, the messages
            of a chat, or vLLM's dict.
        corrupt: the prompt that is patched.
        metric: `LogProb(token)`, `LogitDiff(a, b)`, `KL()` or `Recovered(metric)` of
            `midstream.lab.sweep`, of the token after the prompt; or a function of the logits,
            float32 [tokens, vocabulary], that returns a tensor of one number.
        layers, sites, positions, exclude, groups, heads, align, alpha, mask: the cells; see
            `LLM.sweep`.
        llm: a `midstream.LLM` that gives the activations, which must tap the sites. None: the twin
            gives them.

    Returns:
        The estimates, as a grid that is labelled like a `Sweep`.

    Raises:
        SpecError: an argument is malformed, or the model or a prompt lacks something.
    """
    if not isinstance(twin, Twin):
        twin, llm = Twin(twin), twin if llm is None else llm
    if llm is not None:
        check_same_model(llm, twin.shape)
    with at("clean"):
        clean_ids = twin.prompts.ids(clean)
    with at("corrupt"):
        corrupt_ids = twin.prompts.ids(corrupt)
    request = SweepRequest(
        PromptSource(clean_ids),
        read_with_ids(metric, twin.prompts.id_of, twin.hooked.vocabulary),
        layers=layers,
        sites=sites,
        positions=positions,
        exclude=exclude,
        groups=groups,
        heads=heads,
        align=align,
        alpha=alpha,
        mask=mask,
    )
    aligned = align_positions(request.align, len(corrupt_ids), len(clean_ids))
    prompt = twin.prompts.located(corrupt_ids)
    grid = plan_grid(request, twin.shape, prompt, aligned)
    check_sizes(request, frozenset(cell.tap for cell in grid.cells), twin.shape)
    shown = read_metric(metric) if isinstance(request.metric, Metric) else name_of(metric)
    sweep = _Estimate(twin, llm, request, shown, grid, aligned, clean_ids, corrupt_ids).run()
    texts = tuple(twin.prompts.texts(corrupt_ids))
    return Attribution(
        sweep, request, twin.shape, SweepPrompt(prompt, texts), twin.prompts.located(clean_ids)
    )


@dataclass
class _Estimate:
    """The passes of one call."""

    twin: Twin
    llm: Any  # the engine that gives the activations; None: the twin does
    request: SweepRequest
    shown: Metric | str  # as it was given, or its name
    grid: Grid
    aligned: Mapping[int, int]  # clean position of each corrupt one
    clean: list[int]
    corrupt: list[int]

    def __post_init__(self) -> None:
        # In the corrupt prompt, ascending, and where they are in the clean one.
        self._targets = sorted(
            {position for cell in self.grid.cells for position in cell.positions}
        )
        self._sources = [self.aligned[position] for position in self._targets]
        self._taps = sorted({cell.tap for cell in self.grid.cells}, key=order)
        self._from: dict[Tap, Tensor] = {}  # rows of the corrupt prompt, if the engine gives them
        self._to: dict[Tap, Tensor] = {}  # rows of the clean prompt
        self._difference: dict[Tap, Tensor] = {}
        # Change of the metric by position, or by position and head.
        self._change: dict[Tap, NDArray[np.float64]] = {}

    def run(self) -> Sweep:
        hooked, metric = self.twin.hooked, self.request.metric
        if self.llm is not None:
            self._to = captured_rows(self.llm, self.clean, self._taps, self._sources)
            self._from = captured_rows(self.llm, self.corrupt, self._taps, self._targets)
        wanted = self._taps if self.llm is None else ()
        logits = plain_pass(
            hooked, self.clean, wanted, self._keep_clean, last_only=isinstance(metric, Metric)
        )
        function = logit_function(metric, logits[-1])
        with torch.no_grad():
            clean = float(function(logits))
        del logits
        corrupt = gradient_pass(
            hooked,
            self.corrupt,
            function,
            self._taps,
            rows=self._subtract,
            gradients=self._multiply,
        )
        return self._sweep(clean, corrupt)

    def _keep_clean(self, tap: Tap, rows: Tensor) -> None:
        self._to[tap] = rows[self._sources].float()

    def _subtract(self, tap: Tap, rows: Tensor) -> None:
        own = self._from.pop(tap, None)
        here = rows[self._targets].float() if own is None else own.to(rows.device)
        self._difference[tap] = self._to.pop(tap).to(rows.device) - here

    def _multiply(self, tap: Tap, gradient: Tensor) -> None:
        product = self._difference.pop(tap).double() * gradient[self._targets].double()
        if self.request.heads is not None:
            product = product.unflatten(-1, (self.twin.shape.num_heads(tap), -1))
        if self.request.dims:
            product = product[..., list(self.request.dims)]
        if self.request.weights is not None:
            weights = torch.from_numpy(self.request.weights.numpy().astype(np.float64))
            product = product * weights.to(product.device)
        self._change[tap] = self.request.alpha * product.sum(-1).cpu().numpy()

    def _sweep(self, clean: float, corrupt: float) -> Sweep:
        base, scale = corrupt, 1.0
        metric = self.request.metric
        if isinstance(metric, Recovered):
            if clean == corrupt:
                raise SpecError(
                    "metric",
                    f"the clean and the corrupt run have the same value, {corrupt:.6g}, so there "
                    "is nothing to recover",
                )
            base, scale = 0.0, 1.0 / (clean - corrupt)
        place = {position: row for row, position in enumerate(self._targets)}
        values = np.full(self.grid.shape, np.nan, np.float32)
        for cell in self.grid.cells:
            change = self._change[cell.tap][[place[position] for position in cell.positions]]
            if cell.head is not None:
                change = change[:, cell.head]
            values[cell.index] = base + scale * float(change.sum())
        texts = self.twin.prompts.texts(self.corrupt)
        return Sweep(
            values,
            self.grid.dims,
            self.grid.coords,
            self.shown,
            corrupt,
            clean,
            math.nan,
            tuple("".join(texts[position] for position in places) for places in self.grid.places),
        )


def captured_rows(
    llm: Any, tokens: Sequence[int], taps: Sequence[Tap], positions: Sequence[int]
) -> dict[Tap, Tensor]:
    """Return rows of a `midstream.LLM` at positions in any order, float32 [positions, width]."""
    from vllm import SamplingParams

    for tap in taps:
        check_tapped(tap, llm.info.shape, "sites", "layers")
    (output,) = llm.generate(
        [{"prompt_token_ids": list(tokens)}],
        SamplingParams(max_tokens=1, temperature=0, detokenize=False),
        capture=[captures_of(taps, positions)],
        use_tqdm=False,
    )
    by_tap = {}
    for tap in taps:
        rows = output.activations[tap]
        known = output.activations.positions_of(*tap).tolist()
        place = {position: row for row, position in enumerate(known)}
        by_tap[tap] = rows.reshape(len(rows), -1).float()[
            [place[position] for position in positions]
        ]
    return by_tap
