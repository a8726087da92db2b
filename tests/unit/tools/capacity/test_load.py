"""Loads: bytes are what codecs and the store write, and what saturates first is needed most."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.jobs import fakes
from unit.tools.capacity.plans import CODECS, RATES, job, jobs

from midstream.codecs import parse_codec
from midstream.errors import SpecError
from midstream.jobs import capture_dataset
from midstream.spec import Capture
from midstream.store import Entry, Header, TapRows, Writer, open_store
from midstream.store.format.lines import dump
from midstream.tools.capacity import Fleet, load_of
from midstream.tools.capacity.advice import loads_of
from midstream.tools.capacity.load import METADATA_BYTES, STORE, WRITER, engine_rate
from midstream.tools.capacity.rates import WIDE
from midstream.tools.capacity.shape import DTYPES, read_config

LAYOUTS = ("gathered", "sharded")


def loads(planned, layouts=LAYOUTS, rates=RATES):
    return [load_of(planned, parse_codec(c), r, rates) for c in CODECS for r in layouts]


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("codec", [*CODECS, "rp8:k=64,seed=1", "topk8:k=8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [96, 576])
def test_a_row_is_as_wide_as_the_codec_encodes_it(codec, dtype, hidden):
    rows = torch.randn(3, hidden).to(getattr(torch, dtype))
    encoded = parse_codec(codec).encode(rows)
    config = {"hidden_size": hidden, "num_hidden_layers": 4, "model_type": "other"}
    planned = replace(job(), size=read_config(config, "m", "", dtype), taps=(("resid_post", 1),))
    load = load_of(planned, parse_codec(codec), "gathered", RATES.with_given(engine=1e4))
    assert load.row_bytes * 3 == encoded.nbytes
    assert load.token_bytes * 3 == encoded.nbytes


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("layers", "length", "sites"),
    [
        ([3], 8, ["resid_post"]),
        pytest.param([0, 5, 9], 64, ["resid_post"], marks=pytest.mark.nightly),
        ([0, 5], 64, ["resid_post", "k", "mlp_act"]),
        pytest.param("all", 200, ["resid_post"], marks=pytest.mark.nightly),
    ],
)
def test_a_store_that_is_written_takes_what_was_reckoned(tmp_path, codec, layers, length, sites):
    """Of many requests with the metadata that is reckoned with, in one shard: within 1 %."""
    config = {
        "hidden_size": 576, "num_hidden_layers": 12, "model_type": "other",
        "num_attention_heads": 9, "intermediate_size": 1536,
        "num_key_value_heads": 8 if codec.startswith("rp8") else 3,
    }  # fmt: skip
    size = read_config(config, "m", "", "bfloat16")
    planned = replace(job(layers=[0]), size=size, request_tokens=length)
    chosen = range(12) if layers == "all" else layers
    planned = replace(planned, taps=tuple((site, n) for n in chosen for site in sites))
    spec = parse_codec(codec)
    header = Header(
        model="m", revision="", hidden_size=576, dtype="bfloat16", codec=spec.spec,
        widths={tap: size.width(tap) for tap in planned.taps if size.width(tap) != 576},
        vllm="0.26.0", midstream="0.1.0",
    )  # fmt: skip
    metadata = {"filled": "x" * (METADATA_BYTES - len(dump({"filled": ""})))}
    ids = torch.arange(length)
    taps = {
        tap: TapRows(spec.encode(torch.randn(length, size.width(tap)).bfloat16()), ids, ids)
        for tap in planned.taps
    }
    with Writer(tmp_path, header, shard_bytes=1 << 32) as writer:
        for number in range(300):
            writer.add(
                Entry(
                    request=f"{number:09d}-0123456789abcdef",
                    prompt_tokens=length,
                    taps=taps,
                    metadata=metadata,
                )
            )
    (shard,) = tmp_path.glob("*.safetensors")
    load = load_of(planned, spec, "gathered", RATES.with_given(engine=1e4))
    assert load.stored_bytes * 300 * length == pytest.approx(shard.stat().st_size, rel=0.01)
    assert load.stored_bytes > load.token_bytes + 20


def test_a_request_s_metadata_is_about_as_long_as_what_a_capture_keeps(tmp_path):
    fakes.write_lines(tmp_path, fakes.prompts(20))
    capture_dataset(
        fakes.job(tmp_path, capture=Capture("all", positions="prompt")), fakes.FakeEngine
    )
    kept = [len(dump(one.metadata)) for one in open_store(tmp_path / "acts").requests]
    assert sum(kept) / len(kept) == pytest.approx(METADATA_BYTES, rel=0.3)


def test_requests_without_a_row_take_nothing_of_the_store():
    some = load_of(job(fraction=1 / 512), parse_codec("raw"), "gathered", RATES)
    fewer = load_of(job(fraction=1 / 5120), parse_codec("raw"), "gathered", RATES)
    assert fewer.stored_bytes == pytest.approx(some.stored_bytes / 10)


def test_rows_of_heads_and_neurons_are_counted_by_their_own_width():
    """Llama 8B has 32 heads of queries and 8 of keys, of 128 each, and 14,336 neurons."""
    taps = ["resid_post", "q", "k", "z", "mlp_act"]
    planned = job(layers=[3], sites=taps)
    one = load_of(planned, parse_codec("raw"), "gathered", RATES)
    assert one.token_bytes == 2 * (4096 * 3 + 1024 + 14336)
    assert one.ring_bytes == one.token_bytes * planned.step_tokens
    split = load_of(
        replace(planned, fleet=Fleet.of(4, 1, 8, None, 1)), parse_codec("raw"), "gathered", RATES
    )
    assert split.token_bytes == one.token_bytes
    assert split.rank_bytes == ((2 * 4096 + (one.token_bytes - 8192) / 4,) + (5888 * 2,) * 3,)


def test_the_ends_of_the_model_are_one_row_each():
    planned = job(sites=["embed", "final_norm"])
    assert planned.taps == (("embed", 0), ("final_norm", 31))


def test_what_a_model_lacks_and_codecs_that_need_all_ranks_are_refused():
    with pytest.raises(SpecError, match="sites: .*this layer has no experts"):
        job(sites="router")
    with pytest.raises(SpecError, match="sites: .*experts run in one kernel"):
        job("qwen3-30b-a3b", sites="mlp_act")
    assert job("qwen3-30b-a3b", sites="router").size.width(("router", 1)) == 128
    with pytest.raises(SpecError, match="codec: z is split over 4 ranks"):
        load_of(job(sites="z", tp=4), parse_codec("full8"), "gathered", RATES)
    assert {one.codec for one in loads_of(job(sites="z", tp=4), (), LAYOUTS, RATES)} == {"raw"}


# ---------------------------------------------------------------- properties

slow = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@slow
@given(jobs(), st.integers(2, 50))
def test_totals_grow_with_tokens_and_nothing_else_does(planned, times):
    more = replace(planned, tokens=planned.tokens * times)
    for one, other in zip(loads(planned), loads(more), strict=True):
        assert other.total_bytes == pytest.approx(one.total_bytes * times)
        assert other.seconds == pytest.approx(one.seconds * times)
        assert replace(other, tokens=one.tokens) == one


@slow
@given(jobs())
def test_sharded_ranks_together_move_what_gathered_s_first_one_does(planned):
    for codec in map(parse_codec, CODECS):
        gathered, sharded = (load_of(planned, codec, layout, RATES) for layout in LAYOUTS)
        for first, parts in zip(gathered.rank_bytes, sharded.rank_bytes, strict=True):
            assert first[1:] == (0,) * (planned.fleet.tp - 1)
            assert sum(parts) == pytest.approx(first[0])
        every = sum(sum(stage) for stage in sharded.rank_bytes)
        assert every == pytest.approx(sharded.token_bytes)
        assert sharded.stored_bytes == gathered.stored_bytes
        assert sharded.rate >= gathered.rate * (1 - 1e-9)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_where_taps_come_out_even_a_sharded_rank_moves_one_part_of_tp(tp):
    planned = job("llama-70b", tp=tp)
    for codec in map(parse_codec, CODECS):
        gathered, sharded = (load_of(planned, codec, layout, RATES) for layout in LAYOUTS)
        assert [part * tp for part in sharded.rank_bytes[0]] == [gathered.rank_bytes[0][0]] * tp
        assert sharded.ring_bytes * tp == gathered.ring_bytes


@slow
@given(jobs(), st.floats(1e8, 1e12), st.floats(1e8, 1e13), st.floats(1e8, 1e11))
def test_what_saturates_first_is_needed_most_and_sets_the_pace(planned, network, store, writer):
    rates = RATES.with_given(network=network, store=store, writer=writer)
    for one in loads(planned, rates=rates):
        shares = {each.name: each.share for each in one.resources}
        assert len(shares) == len(one.resources)
        assert shares[one.first.name] == max(shares.values())
        assert one.rate == pytest.approx(one.model_rate / max(shares.values()))
        assert one.rate <= one.model_rate
        # At the job's own pace nothing is needed more than there is of it.
        slower = one.rate / one.model_rate
        for each in one.resources:
            assert each.share * slower <= 1 + 1e-9
            if each.needed is not None and each.available is not None:
                assert each.share == pytest.approx(each.needed / each.available)


@slow
@given(jobs())
def test_more_engines_compute_more_and_each_needs_what_it_needed(planned):
    fleet = planned.fleet
    twice = replace(planned, fleet=replace(fleet, engines=2 * fleet.engines, nodes=2 * fleet.nodes))
    for one, other in zip(loads(planned), loads(twice), strict=True):
        assert other.model_rate == pytest.approx(2 * one.model_rate)
        assert other.resource(WRITER) == one.resource(WRITER)
        assert other.resource(STORE).share == pytest.approx(2 * one.resource(STORE).share)


# ---------------------------------------------------------------- figures


def test_the_measured_job_is_reckoned_to_take_what_it_took():
    """The 8B prefill of the benchmark, whose rows go to memory: within a hundredth."""
    rates = RATES.with_given(writer=1e12)
    planned = job(tokens=WIDE.prompts * WIDE.length)
    for codec, took in WIDE.codecs.items():
        one = load_of(planned, parse_codec(codec), "gathered", rates)
        assert one.first.name == "compute"
        assert one.seconds == pytest.approx(took.value, rel=0.01)
    assert planned.tokens / engine_rate(planned, RATES).value == pytest.approx(WIDE.plain.value)


def test_a_named_rate_is_what_bounds_the_job():
    planned = job("llama-70b", tp=8, nodes=4)
    one = load_of(planned, parse_codec("raw"), "sharded", RATES.with_given(writer=1e8))
    assert one.first.name == WRITER
    assert one.rate == pytest.approx(4 * 1e8 / one.stored_bytes)
    one = load_of(planned, parse_codec("raw"), "sharded", RATES.with_given(bus=1e6))
    assert one.first.name == "bus to the host"
    assert one.rate == pytest.approx(4 * 1e6 / max(one.rank_bytes[0]))
    one = load_of(planned, parse_codec("raw"), "gathered", RATES.with_given(store=1e6))
    assert one.first.name == STORE
    assert one.rate == pytest.approx(1e6 / one.stored_bytes)
    one = load_of(planned, parse_codec("raw"), "gathered", RATES.with_given(network=1e6))
    assert one.rate == pytest.approx(4 * 1e6 / one.stored_bytes)


def test_a_machine_with_more_engines_has_all_of_their_rows_to_send():
    one, eight = job(nodes=1, gpus_per_node=1), job(nodes=1, gpus_per_node=8)
    shares = [
        load_of(each, parse_codec("raw"), "gathered", RATES).resource("network").share
        for each in (one, eight)
    ]
    assert shares[1] == pytest.approx(8 * shares[0])


def test_the_front_end_reads_every_row_and_answers_every_request():
    planned = job("llama-8b", tokens=10**6, request_tokens=100)
    one = load_of(planned, parse_codec("raw"), "gathered", RATES)
    seconds = RATES.request.value / 100 + one.token_bytes / RATES.reader.value
    assert one.resource("front end").share == pytest.approx(seconds * one.model_rate)


def test_the_stage_with_most_of_the_taps_is_the_busiest():
    planned = job("llama-8b", [1, 20, 24, 28], pp=2)
    one = load_of(planned, parse_codec("raw"), "gathered", RATES)
    assert one.rank_bytes == ((8192,), (3 * 8192,))
    bus = one.resource("bus to the host")
    assert bus.needed == pytest.approx(3 * 8192 * one.model_rate)
    assert one.ring_bytes == 3 * 8192 * planned.step_tokens


def test_speeds_that_cannot_be_told_must_be_given():
    size = read_config({"hidden_size": 64, "num_hidden_layers": 2}, "odd", "", "auto")
    planned = replace(job(), size=size, taps=(("resid_post", 0),))
    with pytest.raises(SpecError, match="tokens_per_second: required for odd"):
        engine_rate(planned, RATES)
    found = engine_rate(planned, RATES.with_given(engine=5.0))
    assert (found.value, found.basis) == (5.0, "given")


def test_an_estimate_says_whether_it_rests_on_an_assumption():
    assert engine_rate(job(), RATES).basis == "derived"
    assert engine_rate(job("llama-70b", tp=8), RATES).basis == "assumed"
    assert engine_rate(job("qwen3-30b-a3b"), RATES).basis == "assumed"
    both = RATES.with_given(gpu_flops=4e14, efficiency=0.9)
    assert engine_rate(job("llama-70b", tp=8), both).basis == "given"
