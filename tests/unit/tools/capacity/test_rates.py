"""What plans reckon with: each measured number is in the benchmark's result that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from midstream.errors import SpecError
from midstream.tools.capacity.rates import (
    ASSUMED,
    MEASUREMENTS,
    NARROW,
    WIDE,
    encoder_rate,
    known_rates,
    row_seconds,
)

RESULTS = Path(__file__).resolve().parents[4] / "benchmarks" / "results"
CODECS = ("raw", "full8", "rp8", "topk8")


@pytest.mark.parametrize("one", MEASUREMENTS, ids=lambda one: f"{one.file}:{'.'.join(one.path)}")
def test_each_measured_number_is_the_one_in_its_file(one):
    found = json.loads((RESULTS / one.file).read_text())
    for key in one.path:
        found = found[key]
    assert found == one.value


@pytest.mark.parametrize("work", [WIDE, NARROW], ids=["8b", "0.6b"])
def test_a_workload_s_size_is_that_of_its_file(work):
    found = json.loads((RESULTS / work.plain.file).read_text())["shapes"]
    (shape,) = found.values()
    raw = shape["work"][work.plain.path[3]]["every token, raw"]
    assert raw["row_bytes"] == work.rows * work.vector_bytes
    assert shape["layers"] == work.layers


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("work", [WIDE, NARROW], ids=["8b", "0.6b"])
def test_at_a_width_that_was_measured_a_row_costs_what_was_measured(codec, work):
    assert row_seconds(codec, work.vector_bytes).value == pytest.approx(work.per_row(codec))
    added = row_seconds(codec, work.vector_bytes).value * work.rows
    assert work.plain.value + added == pytest.approx(work.codecs[codec].value)


@pytest.mark.parametrize("codec", ["full8", "rp8", "topk8"])
def test_wider_rows_never_cost_less_with_codecs(codec):
    costs = [row_seconds(codec, 1 << power).value for power in range(8, 18)]
    assert costs == sorted(costs)
    assert costs[-1] == pytest.approx(2 * costs[-2])


def test_only_a_wider_sketch_costs_more():
    assert row_seconds("rp8", 8192, 1024).value == 2 * row_seconds("rp8", 8192, 512).value
    assert row_seconds("rp8", 8192, 64).value == row_seconds("rp8", 8192, 512).value
    assert encoder_rate("rp8", 1024).value == encoder_rate("rp8").value / 2
    assert encoder_rate("raw") is None


def test_what_names_no_file_of_results_says_that_it_is_assumed():
    rates = known_rates()
    for name in ("bus", "reader", "request", "step", "writer", "gpu_flops"):
        one = getattr(rates, name)
        assert one.basis != ASSUMED
        assert (RESULTS / one.source.rpartition(", ")[2]).is_file(), name
    for name in ("network", "store", "efficiency", "gpu_memory"):
        assert getattr(rates, name).basis == ASSUMED


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused_by_its_name(value):
    with pytest.raises(SpecError, match="bus: expected a number above 0"):
        known_rates().with_given(bus=value)


def test_given_rates_take_the_place_of_known_ones_and_say_so():
    rates = known_rates().with_given(bus=5e9, store=None)
    assert (rates.bus.value, rates.bus.basis) == (5e9, "given")
    assert rates.store == known_rates().store
    with pytest.raises(SpecError, match="efficiency: expected a number above 0 and at most 1"):
        known_rates().with_given(efficiency=1.5)
