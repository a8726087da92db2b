"""What is advised: the least lossy codec that keeps the pace, sharded only where it is faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from unit.tools.capacity.plans import RATES, job, jobs

from midstream.codecs import parse_codec
from midstream.errors import SpecError
from midstream.spec.capture import RETURNS
from midstream.tools.capacity import advise, load_of
from midstream.tools.capacity.advice import PACE, WORTH, loads_of
from midstream.tools.capacity.job import read_return

WIDE_OPEN = RATES.with_given(writer=1e13, network=1e13, store=1e15)


def advice(planned, codecs=(), rates=RATES):
    found = loads_of(planned, codecs, read_return("", planned.fleet.tp), rates)
    return found, advise(planned, found, rates)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_no_less_lossy_codec_keeps_the_pace_and_no_layout_is_much_faster(planned):
    found, advised = advice(planned)
    chosen = advised.load
    order = list(dict.fromkeys(one.codec for one in found))
    best = {codec: min(o.first.share for o in found if o.codec == codec) for codec in order}
    less = order[: order.index(chosen.codec)]
    if chosen.first.share <= PACE:
        # Of a codec that is passed over not even the better layout would do, but for what
        # sharded gains without being worth it.
        assert all(best[codec] > PACE / WORTH for codec in less)
    else:
        assert chosen.first.share <= min(best.values()) * WORTH
    same = [one for one in found if one.codec == chosen.codec]
    assert chosen.rate >= max(one.rate for one in same) / WORTH
    assert advised.reasons


def test_where_all_is_wide_open_nothing_needs_to_be_lost():
    _, advised = advice(job("llama-8b", layers=[16]), rates=WIDE_OPEN)
    assert (advised.load.codec, advised.load.returned, advised.capacities) == (
        "raw",
        "gathered",
        (),
    )


def test_a_narrow_writer_asks_for_a_smaller_codec_or_fewer_rows():
    planned = job("llama-8b")
    _, advised = advice(planned)
    assert advised.load.codec == "rp8:k=512,seed=0"
    said = " ".join(advised.reasons)
    assert "raw: the job would take" in said
    assert "Bottleneck: store writer" in said
    assert "To store whole vectors, capture fewer" in said
    assert [one.codec for one in advised.capacities] == ["raw", "full8"]


@pytest.mark.parametrize("codec", ["raw", "full8"])
def test_what_there_is_room_for_keeps_the_pace_and_a_little_more_does_not(codec):
    planned = job("llama-70b", tp=8)
    _, advised = advice(planned)
    capacity = next(one for one in advised.capacities if one.codec == codec)

    def share(**fields):
        smaller = replace(planned, **fields)
        return load_of(smaller, parse_codec(codec), capacity.returned, RATES).first.share

    assert (
        share(taps=planned.taps[: capacity.taps])
        <= PACE
        < share(taps=planned.taps[: capacity.taps + 1])
    )
    assert share(fraction=capacity.fraction) <= PACE < share(fraction=capacity.fraction + 0.001)


def test_sharded_is_advised_where_the_first_rank_holds_all_others_back():
    planned = job("llama-70b", tp=8)
    _, advised = advice(planned, ["topk8:k=64"], WIDE_OPEN)
    assert advised.load.returned == "sharded"
    assert "each rank transfers at most 12% of a stage's bytes" in " ".join(advised.reasons)
    _, advised = advice(job("llama-70b", layers=[40], tp=8), ["raw"], WIDE_OPEN)
    assert advised.load.returned == "gathered"


def test_a_ring_that_is_too_small_and_a_model_too_large_are_told():
    _, advised = advice(job("llama-70b", tp=8), ["topk8"], WIDE_OPEN)
    assert advised.load.returned == "sharded"
    gathered = load_of(job("llama-70b", tp=8), parse_codec("raw"), "gathered", WIDE_OPEN)
    assert gathered.ring_bytes == 80 * 8192 * 2 * 8192
    alone = advise(job("llama-70b", tp=8), [gathered], WIDE_OPEN)
    (ring,) = [note for note in alone.notes if note.startswith("Staging ring")]
    assert "10.7 GB" in ring
    assert "8.8 GB" in ring
    assert not [note for note in advised.notes if "ring" in note]
    _, advised = advice(job("llama-405b", layers=[5], tp=8))
    assert not [note for note in advised.notes if "not fit unless" in note]
    _, advised = advice(job("llama-405b", layers=[5], tp=4))
    assert [note for note in advised.notes if "not fit unless" in note]


def test_experts_and_engines_that_span_machines_are_told():
    _, advised = advice(job("qwen3-30b-a3b", layers=[5]))
    assert [note for note in advised.notes if "experts were not measured" in note]
    _, advised = advice(job("llama-405b", layers=[5], tp=8, pp=2))
    assert [note for note in advised.notes if "spans machines" in note]


def test_codecs_that_are_named_must_do_and_usual_ones_are_left_out_where_they_cannot():
    narrow = replace(job(), size=replace(job().size, hidden_size=32))
    assert {one.codec for one in loads_of(narrow, (), RETURNS[:1], RATES)} == {
        "raw",
        "full8",
        "rp8:k=512,seed=0",
    }
    with pytest.raises(SpecError, match=r"codec\.k: expected at most 32"):
        loads_of(narrow, ["topk8"], RETURNS[:1], RATES)
    with pytest.raises(SpecError, match="codec: expected one of"):
        loads_of(narrow, ["zip"], RETURNS[:1], RATES)
