"""Jobs and fleets: what is refused, and who moves which rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.tools.capacity.plans import job

from midstream.errors import SpecError
from midstream.tools.capacity import Fleet, read_model
from midstream.tools.capacity.job import ranks, read_return, stages


@given(st.integers(1, 130), st.integers(1, 16))
def test_layers_are_shared_out_as_vllm_does_it(layers, pp):
    from vllm.distributed.utils import get_pp_indices

    if pp > layers:
        return
    assert [(each.start, each.stop) for each in stages(layers, pp)] == [
        get_pp_indices(layers, rank, pp) for rank in range(pp)
    ]


@given(st.integers(0, 32), st.sampled_from((1, 2, 4, 8)))
def test_the_ranks_of_a_stage_move_each_row_once(count, tp):
    size = read_model("llama-8b")
    taps = [("resid_post", layer) for layer in range(count)]
    sharded, gathered = (ranks(size, taps, tp, way) for way in ("sharded", "gathered"))
    assert gathered == [[4096] * count] + [[]] * (tp - 1)
    assert sharded == [[4096 for i in range(count) if i % tp == rank] for rank in range(tp)]


@pytest.mark.parametrize(("tp", "copies"), [(2, 1), (4, 1), (8, 1), (16, 2)])
@pytest.mark.parametrize("returned", ["gathered", "sharded"])
def test_each_rank_moves_its_heads_and_neurons_and_keys_of_several_ranks_once(tp, copies, returned):
    """Eight heads of keys; of both layouts, as no rank has the others' heads."""
    size = read_model("llama-8b")
    found = ranks(size, [("q", 3), ("k", 3), ("mlp_act", 3), ("resid_post", 3)], tp, returned)
    keys = 1024 // (tp // copies)
    for rank, widths in enumerate(found):
        mine = [4096 // tp, *([] if rank % copies else [keys]), 14336 // tp]
        assert widths == [*mine, *([] if rank else [4096])]


@pytest.mark.parametrize(
    ("arguments", "engines", "nodes"),
    [
        ((1, 1, 8, None, None), 1, 1),
        ((8, 2, 8, None, None), 1, 2),
        ((8, 2, 8, 64, None), 32, 64),
        ((4, 1, 8, 64, None), 128, 64),
        ((4, 1, 8, None, 3), 3, 2),
        ((1, 1, 8, 2, 5), 5, 2),
    ],
)
def test_a_fleet_has_as_many_engines_and_machines_as_go_together(arguments, engines, nodes):
    fleet = Fleet.of(*arguments)
    assert (fleet.engines, fleet.nodes) == (engines, nodes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 1, 8, None, None), "tp: expected an integer of at least 1"),
        ((16, 1, 8, None, None), "tp: expected at most 8, the GPUs.*use pp"),
        ((3, 1, 8, None, None), "tp: expected a divisor of 8, the GPUs"),
        ((8, 0, 8, None, None), "pp: expected an integer of at least 1"),
        ((1, 1, 0, None, None), "gpus_per_node: expected"),
        ((8, 2, 8, 3, None), "nodes: 3 machines have 24 GPUs.*tp · pp = 16"),
        (
            (8, 2, 8, 2, 2),
            "dp: expected at most 1, got 2: 2 engines need 32 GPUs, and there are 16",
        ),
        ((1, 1, 8, 0, None), "nodes: expected an integer of at least 1"),
        ((1, 1, 8, None, 0), "dp: expected an integer of at least 1"),
    ],
)
def test_a_fleet_that_does_not_come_out_even_is_refused_with_what_would(arguments, said):
    with pytest.raises(SpecError, match=said):
        Fleet.of(*arguments)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tokens": 0}, "tokens: expected an integer of at least 1"),
        ({"request_tokens": 0}, "request_tokens: expected"),
        ({"step_tokens": 0}, "step_tokens: expected"),
        ({"fraction": 0.0}, "fraction: expected a number above 0 and at most 1"),
        ({"fraction": 1.5}, "fraction: expected"),
        ({"fraction": float("nan")}, "fraction: expected"),
        ({"layers": [32]}, "layers.*out of range: the model has 32 layers"),
        ({"layers": [31, -1]}, "layer -1 is the same as layer 31"),
        ({"layers": "some"}, 'expected "all" or layer indices'),
        ({"sites": "resid"}, "unknown|expected"),
        ({"pp": 33, "gpus_per_node": 8}, "pp: expected at most 32, the model's layers"),
    ],
)
def test_a_job_that_cannot_be_is_refused_by_its_field(fields, said):
    with pytest.raises(SpecError, match=said):
        job(**fields)


def test_a_layout_is_gathered_or_sharded_and_both_where_it_matters():
    assert read_return("", 1) == ("gathered",)
    assert read_return("", 2) == ("gathered", "sharded")
    assert read_return("sharded", 8) == ("sharded",)
    with pytest.raises(SpecError, match="return: expected gathered and sharded|return: expected"):
        read_return("scattered", 8)
