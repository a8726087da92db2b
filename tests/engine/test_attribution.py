"""Gradients against finite differences in engines, and estimates of patches against sweeps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines import greedy, tokens
from support.oracle import relative_error

from midstream import Replace, Steer
from midstream.lab.attribution import Twin, attribution_patching
from midstream.lab.sweep import LogitDiff
from midstream.sites import OUTER

CORRUPT = [5, 17, 33, 101, 8, 77, 12]
CLEAN = [5, 17, 90, 14, 8, 77, 12]
METRIC = LogitDiff(7, 11)


def measured(llm: Any, prompt: list[int], metric: LogitDiff, edits: list[Any]) -> list[float]:
    """The metric of one request for each edit."""
    params = greedy(1)
    params.logprob_token_ids = [metric.a, metric.b]
    outputs = llm.generate([tokens(prompt)] * len(edits), params, edits=[[one] for one in edits])
    found = [output.outputs[0].logprobs[0] for output in outputs]
    return [each[metric.a].logprob - each[metric.b].logprob for each in found]


def finite_differences(
    llm: Any, twin: Twin, prompt: list[int], metric: LogitDiff, places: list[tuple[str, int, int]]
) -> list[tuple[float, float]]:
    """(by differences in the engine, by the twin's gradient) of the derivative at each place, in a
    direction that is half the gradient's and half random.
    """
    sites, layers = sorted({site for site, _, _ in places}), sorted({one[1] for one in places})
    gradients = twin.gradients(prompt, metric, sites=sites, layers=layers)
    rows = twin.activations(prompt, sites=sites, layers=layers)
    draw = torch.Generator().manual_seed(0)
    edits, expected, steps = [], [], []
    for site, layer, position in places:
        gradient = gradients[site, layer][position]
        noise = torch.randn(gradient.shape, generator=draw)
        direction = gradient / gradient.norm() + noise / noise.norm()
        step = 0.01 * float(rows[site, layer][position].norm() / direction.norm())
        for sign in (1, -1):
            edits.append(
                Steer(sign * step * direction, layer, site=site, positions=[position], scale=1.0)
            )
        steps.append(step)
        expected.append(float(gradient @ direction))
    values = measured(llm, prompt, metric, edits)
    return [
        ((values[2 * nth] - values[2 * nth + 1]) / (2 * step), expected[nth])
        for nth, step in enumerate(steps)
    ]


@pytest.fixture(scope="module")
def twin(tiny_llama: Path) -> Twin:
    return Twin.load(tiny_llama)


def test_gradients_are_the_finite_differences_of_edits_in_the_engine(wide: Any, twin: Twin) -> None:
    places = [(site, layer, (2, 3, 6)[layer]) for site in OUTER for layer in range(3)]
    for (site, layer, position), (by_engine, by_twin) in zip(
        places, finite_differences(wide, twin, CORRUPT, METRIC, places), strict=True
    ):
        assert by_engine == pytest.approx(by_twin, rel=2e-3), (site, layer, position)


def test_activations_of_the_engine_give_the_estimates_of_the_twin(wide: Any, twin: Twin) -> None:
    given = (CLEAN, CORRUPT, METRIC)
    by_twin = attribution_patching(twin, *given, sites=list(OUTER), positions=[2, 3, -1])
    by_engine = attribution_patching(
        twin, *given, sites=list(OUTER), positions=[2, 3, -1], llm=wide
    )
    assert relative_error(*map(torch.from_numpy, (by_engine.values, by_twin.values))) < 1e-4
    made = attribution_patching(wide, *given, sites=list(OUTER), positions=[2, 3, -1])
    assert np.array_equal(made.values, by_engine.values)


def test_a_check_has_the_values_of_single_requests_that_replace(wide: Any, twin: Twin) -> None:
    found = attribution_patching(twin, CLEAN, CORRUPT, METRIC, sites=list(OUTER))
    checked = found.check(wide, top=6)
    assert len(checked.cells) == 6
    rows = twin.activations(CLEAN, sites=list(OUTER))
    for cell, top in zip(checked.cells, found.top(6), strict=True):
        site, layer, position = cell["site"], cell["layer"], cell["position"]
        row = rows[site, layer][position]
        (alone,) = measured(
            wide, CORRUPT, METRIC, [Replace(row, layer, site=site, positions=[position])]
        )
        assert cell["measured"] == pytest.approx(alone, abs=1e-5)
        assert (cell["estimate"], cell["token"]) == (top["value"], top["token"])
    index = [
        tuple(found.coords[name].index(cell[name]) for name in found.dims) for cell in checked.cells
    ]
    assert np.isfinite(checked.measured.values).sum() == 6
    assert [checked.measured.values[one] for one in index] == pytest.approx(checked.measurements)
    assert checked.measured.receipts.status == "ok"
    assert f"correlation {checked.correlation:.3f}" in str(checked)
