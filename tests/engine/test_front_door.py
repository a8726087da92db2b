"""What is refused, when, and that the engine is none the worse for it."""

from typing import Any

import pytest
from engine.asking import ask, ask_all
from engine.refusals import assert_refused
from support.engine_view import inspect
from support.engines import engine, generated, greedy, stopped_at

from midstream import Capture, Steer
from midstream.errors import SpecError, TapError

PROMPT = [5, 6, 7, 8]
HIDDEN = 64
GOOD = [0.5] * HIDDEN
READ = Capture(layers=[0])


def assert_fine(llm: Any) -> None:
    """Nothing is left of the calls before, and the next one has its own prompt and rows."""
    assert not inspect(llm).leftovers()
    (output,) = ask_all(llm, [[9, 8]], 2, capture=READ)
    assert output.prompt_token_ids == [9, 8]
    assert output.receipt.status == "ok"
    inspect(llm).check_integrity()


def test_a_wrong_request_is_refused_by_field_and_the_engine_goes_on(llm):
    nan = [float("nan")] * HIDDEN
    assert_refused(
        lambda asked: ask(llm, PROMPT, **asked),
        [
            ({"capture": {"layers": [3]}}, "capture.layers", "3 layers"),
            ({"capture": {"layers": [0], "sites": "resid_past"}}, "capture.sites", "resid_post"),
            ({"capture": {"layers": [0], "where": 1}}, "capture", "where"),
            ({"capture": {"layers": [0], "positions": 9}}, "capture.positions", "position"),
            ({"steer": {"vector": [1.0], "layer": 0}}, "steer.vector", "64"),
            ({"steer": {"vector": nan, "layer": 0}}, "steer.vector[0]", "nan"),
            ({"steer": {"vector": GOOD, "layer": -9}}, "steer.layer", "range"),
            ({"steer": {"vector": GOOD, "layer": 0, "positions": []}}, "steer.positions", "least"),
        ],
    )
    assert_fine(llm)


def test_one_bad_prompt_among_good_ones_leaves_nothing_behind(llm):
    with pytest.raises(SpecError, match=r"capture\[2\]|position"):
        ask_all(llm, [PROMPT] * 3, capture=[READ, READ, Capture(layers=[0], positions=20)])
    assert not llm.llm_engine.has_unfinished_requests()
    assert_fine(llm)


def test_an_error_names_the_field_as_it_was_written_and_the_prompt(llm):
    steers = [None, [Steer(GOOD, layer=0), Steer(GOOD, layer=1, positions=50)]]
    with pytest.raises(SpecError) as raised:
        ask_all(llm, [PROMPT] * 2, steer=steers)
    assert raised.value.path == "steer[1][1].positions"
    with pytest.raises(SpecError, match=r"\(prompt 1\)") as raised:
        ask_all(llm, [[5] * 30, PROMPT], capture=Capture(layers=[0], positions=20))
    assert raised.value.path == "capture.positions"


def test_plain_vllm_with_additional_config_gives_the_same(tiny_llama, llm):
    params = greedy(3, detokenize=False, extra_args={"midstream": {"capture": {"layers": "all"}}})
    own = {"midstream": {"layers": [0, 2]}}
    with engine(tiny_llama, plain=True, additional_config=own) as plain:
        output = ask(plain, PROMPT, params)
    assert output.activations.layers == (0, 2)
    assert generated(output) == generated(ask(llm, PROMPT, 3))


def test_an_engine_that_is_not_enabled_refuses_plans_once_midstream_is_loaded(tiny_llama, llm):
    params = greedy(3, extra_args={"midstream": {"capture": {"layers": [0]}}})
    with (
        engine(tiny_llama, plain=True) as plain,
        pytest.raises(SpecError, match="does not have midstream enabled"),
    ):
        ask(plain, PROMPT, params)


def test_a_capture_too_large_for_the_staging_ring_is_refused_naming_the_setting(tiny_llama):
    own = {"staging_bytes": 64 * HIDDEN * 4 * 2, "sites": ["resid_post"]}
    with engine(tiny_llama, max_num_batched_tokens=64, max_num_seqs=8, midstream=own) as small:
        prompts = [list(range(3, 63))] * 4
        outputs = ask_all(small, prompts, capture=Capture(layers=[0, 2]))
        assert all(output.receipt.status == "ok" for output in outputs)
        with pytest.raises(SpecError, match="staging_bytes"):
            ask_all(small, prompts, capture=Capture(layers="all"))


def test_a_tap_that_does_not_fire_stops_the_engine_as_it_starts(tiny_llama, monkeypatch):
    from midstream.runtime.worker.taps import taps

    fire = taps._fire

    def deaf(module: Any, table: Any, *rest: Any) -> None:
        if module.__class__.__name__ != "TappedRMSNorm":
            fire(module, table, *rest)

    monkeypatch.setattr(taps, "_fire", deaf)
    with pytest.raises(TapError, match="did not"), engine(tiny_llama):
        pass


def test_default_layers_give_plain_dicts_of_hidden_states(tiny_llama, llm):
    everything = ask(llm, PROMPT, 5, capture=Capture(layers="all")).activations
    whole = {"include_prefill": True}
    last = {"last_prefill_token": True, "include_decode": False}
    for layers, args, prefill, decode in (
        ([0, 2], whole, slice(0, 4), slice(4, 8)),
        (["all"], last, slice(3, 4), None),
    ):
        with engine(tiny_llama, midstream=None, layers=layers, **args) as probe:
            output = ask(probe, PROMPT, 5)
            for rows, found in (
                (prefill, output.prefill_hidden_states),
                (decode, output.hidden_states),
            ):
                named = [0, 1, 2] if layers == ["all"] else layers
                assert list(found) == ([] if rows is None else named)
                for layer, value in found.items():
                    expected = everything["resid_post", layer][rows]
                    assert value.shape == expected.shape
                    assert (value - expected).abs().max() < 1e-4
            short = ask(probe, PROMPT, 1)
            assert all(value.shape[0] == 0 for value in short.hidden_states.values())


def test_a_call_that_is_given_up_takes_its_requests_with_it(llm):
    with stopped_at(llm, 3), pytest.raises(KeyboardInterrupt):
        ask_all(llm, [PROMPT] * 6, 20, capture=READ)
    assert_fine(llm)


def test_a_call_that_is_given_up_while_it_waits_for_its_results_leaves_nothing(llm, monkeypatch):
    waited = []

    def interrupted(futures: Any) -> None:
        waited.append(futures)
        if len(waited) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("midstream.runtime.frontend.sync_frontend.wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask_all(llm, [PROMPT] * 6, 2, capture=READ)
    monkeypatch.undo()
    assert len(waited) == 2
    assert_fine(llm)
