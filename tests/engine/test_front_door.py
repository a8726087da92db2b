"""What is refused, when, and that the engine is none the worse for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine_view import inspect
from support.engines import engine, generated, greedy, stopped_at, tokens

from midstream import Capture, ConfigError, SpecError, Steer, TapError, UnsupportedError

PROMPT = [5, 6, 7, 8]
HIDDEN = 64
GOOD = [0.5] * HIDDEN


@pytest.mark.parametrize(
    ("asked", "path", "message"),
    [
        ({"capture": {"layers": [3]}}, "capture", "3 layers"),
        ({"capture": {"layers": [0], "sites": "resid_past"}}, "capture.sites", "resid_post"),
        ({"capture": {"layers": [0], "where": 1}}, "capture", "where"),
        ({"capture": {"layers": [0], "positions": 9}}, "capture", "position"),
        ({"steer": {"vector": [1.0], "layer": 0}}, r"steer\.vector", "64"),
        ({"steer": {"vector": [float("nan")] * HIDDEN, "layer": 0}}, "steer", "nan"),
        ({"steer": {"vector": GOOD, "layer": -9}}, r"steer\.layer", "range"),
        ({"steer": [{"vector": GOOD, "layer": 0, "positions": 40}]}, r"steer\[0\]", "position"),
        ({"steer": {"vector": GOOD, "layer": 0, "positions": []}}, "steer", "at least one"),
    ],
)
def test_a_wrong_request_is_refused_by_field_and_the_engine_goes_on(
    llm: Any, asked: dict[str, Any], path: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message) as raised:
        llm.generate(tokens(PROMPT), greedy(3, detokenize=False), use_tqdm=False, **asked)
    assert raised.match(path)
    output = llm.generate(
        tokens(PROMPT), greedy(3, detokenize=False), capture=Capture(layers=[0]), use_tqdm=False
    )[0]
    assert output.receipt.status == "ok"
    inspect(llm).check_integrity()


def test_one_bad_prompt_among_good_ones_leaves_nothing_behind(llm: Any) -> None:
    capture = [Capture(layers=[0]), Capture(layers=[0]), Capture(layers=[0], positions=20)]
    with pytest.raises(SpecError, match=r"capture\[2\]|position"):
        llm.generate(
            [tokens(PROMPT)] * 3, greedy(3, detokenize=False), capture=capture, use_tqdm=False
        )
    assert not llm.llm_engine.has_unfinished_requests()
    assert not inspect(llm).in_flight()
    llm.generate(tokens(PROMPT), greedy(2, detokenize=False), use_tqdm=False)
    inspect(llm).check_integrity()


def test_an_error_names_the_field_as_it_was_written_and_the_prompt(llm: Any) -> None:
    steers = [None, [Steer(GOOD, layer=0), Steer(GOOD, layer=1, positions=50)]]
    with pytest.raises(SpecError) as raised:
        llm.generate([tokens(PROMPT)] * 2, greedy(3), steer=steers, use_tqdm=False)
    assert raised.value.path == "steer[1][1].positions"
    prompts = [tokens([5] * 30), tokens(PROMPT)]
    with pytest.raises(SpecError, match=r"\(prompt 1\)") as raised:
        llm.generate(prompts, greedy(3), capture=Capture(layers=[0], positions=20), use_tqdm=False)
    assert raised.value.path == "capture.positions"


def test_lists_of_the_wrong_length_are_refused(llm: Any) -> None:
    with pytest.raises(SpecError, match="2 entries for 3 prompts"):
        llm.generate([tokens(PROMPT)] * 3, greedy(2), capture=[None, Capture(layers=[0])])
    with pytest.raises(SpecError, match="2 for 3 prompts"):
        llm.generate([tokens(PROMPT)] * 3, [greedy(2)] * 2, capture=Capture(layers=[0]))


def test_an_edit_that_could_never_fire_is_refused(llm: Any) -> None:
    with pytest.raises(SpecError, match="never fed back"):
        llm.generate(tokens(PROMPT), greedy(1), steer=[Steer(GOOD, layer=0, phase="generated")])


def test_plans_ride_in_extra_args_as_dicts_too(llm: Any) -> None:
    params = greedy(
        3,
        detokenize=False,
        extra_args={"midstream": {"capture": {"layers": [1], "positions": "last_prompt"}}},
    )
    output = llm.generate(tokens(PROMPT), params, use_tqdm=False)[0]
    assert output.activations.positions.tolist() == [3]
    with pytest.raises(SpecError, match="one place"):
        llm.generate(tokens(PROMPT), params, capture=Capture(layers=[0]), use_tqdm=False)
    bad = greedy(3, extra_args={"midstream": {"captures": []}})
    with pytest.raises(SpecError, match=r"extra_args\['midstream'\]: unknown field 'captures'"):
        llm.generate(tokens(PROMPT), bad, use_tqdm=False)


def test_plain_vllm_with_additional_config_gives_the_same(tiny_llama: Path, llm: Any) -> None:
    params = greedy(3, detokenize=False, extra_args={"midstream": {"capture": {"layers": "all"}}})
    with engine(
        tiny_llama, plain=True, additional_config={"midstream": {"layers": [0, 2]}}
    ) as plain:
        output = plain.generate(tokens(PROMPT), params, use_tqdm=False)[0]
    assert output.activations.layers == (0, 2)
    expected = llm.generate(
        tokens(PROMPT), greedy(3, detokenize=False), capture=Capture(layers=[0, 2]), use_tqdm=False
    )[0]
    assert generated(output) == generated(expected)


def test_an_engine_that_is_not_enabled_refuses_plans_once_midstream_is_loaded(
    tiny_llama: Path, llm: Any
) -> None:
    params = greedy(3, extra_args={"midstream": {"capture": {"layers": [0]}}})
    with (
        engine(tiny_llama, plain=True) as plain,
        pytest.raises(SpecError, match="does not have midstream enabled"),
    ):
        plain.generate(tokens(PROMPT), params, use_tqdm=False)


def test_settings_that_cannot_be_served_are_refused_at_start_up(tiny_llama: Path) -> None:
    with (
        pytest.raises(UnsupportedError, match="kv_sharing_fast_prefill"),
        engine(tiny_llama, kv_sharing_fast_prefill=True),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="out of range"),
        engine(tiny_llama, midstream={"layers": [7]}),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="staging_byte"),
        engine(tiny_llama, midstream={"staging_byte": 7}),
    ):
        pass


def test_a_capture_too_large_for_the_staging_ring_is_refused_naming_the_setting(
    tiny_llama: Path,
) -> None:
    room = 64 * HIDDEN * 4 * 2
    with engine(
        tiny_llama,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        midstream={"staging_bytes": room, "sites": ["resid_post"]},
    ) as small:
        prompts = [tokens(list(range(3, 63)))] * 4
        outputs = small.generate(
            prompts, greedy(3, detokenize=False), capture=Capture(layers=[0, 2]), use_tqdm=False
        )
        assert all(output.receipt.status == "ok" for output in outputs)
        with pytest.raises(SpecError, match="staging_bytes"):
            small.generate(prompts, greedy(3), capture=Capture(layers="all"), use_tqdm=False)


def test_a_tap_that_does_not_fire_stops_the_engine_as_it_starts(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from midstream.runtime.worker.taps import taps

    fire = taps._fire

    def deaf(module: Any, table: Any, *rest: Any) -> None:
        if module.__class__.__name__ != "TappedRMSNorm":
            fire(module, table, *rest)

    monkeypatch.setattr(taps, "_fire", deaf)
    with pytest.raises(TapError, match="did not"), engine(tiny_llama):
        pass


def test_default_layers_give_plain_dicts_of_hidden_states(tiny_llama: Path, llm: Any) -> None:
    everything = llm.generate(
        tokens(PROMPT), greedy(5, detokenize=False), capture=Capture(layers="all"), use_tqdm=False
    )[0].activations
    ways: list[tuple[dict[str, Any], slice | None, slice | None]] = [
        ({"layers": [0, 2]}, None, slice(4, 8)),
        ({"layers": "all", "include_prefill": True}, slice(0, 4), slice(4, 8)),
        (
            {"layers": ["all"], "last_prefill_token": True, "include_decode": False},
            slice(3, 4),
            None,
        ),
        ({"layers": [1], "last_decode_token": True}, None, slice(7, 8)),
    ]
    for args, prefill, decode in ways:
        with engine(tiny_llama, midstream=None, **args) as probe:
            output = probe.generate(tokens(PROMPT), greedy(5, detokenize=False), use_tqdm=False)[0]
            layers = [0, 2] if args["layers"] == [0, 2] else [0, 1, 2]
            layers = [1] if args["layers"] == [1] else layers
            for rows, found in (
                (prefill, output.prefill_hidden_states),
                (decode, output.hidden_states),
            ):
                assert list(found) == ([] if rows is None else layers)
                for layer, value in found.items():
                    expected = everything["resid_post", layer][rows]
                    assert value.shape == expected.shape
                    assert (value - expected).abs().max() < 1e-4
            short = probe.generate(tokens(PROMPT), greedy(1, detokenize=False), use_tqdm=False)[0]
            assert all(value.shape[0] == 0 for value in short.hidden_states.values())


def test_a_call_that_is_given_up_takes_its_requests_with_it(llm: Any) -> None:
    with stopped_at(llm, 3), pytest.raises(KeyboardInterrupt):
        llm.generate([tokens(PROMPT)] * 6, greedy(20), capture=Capture(layers=[0]), use_tqdm=False)
    outputs = llm.generate(
        tokens([9, 8]), greedy(2, detokenize=False), capture=Capture(layers=[0]), use_tqdm=False
    )
    assert [output.prompt_token_ids for output in outputs] == [[9, 8]]
    assert outputs[0].receipt.status == "ok"
    inspect(llm).check_integrity()


def test_a_call_that_is_given_up_while_it_waits_for_its_results_leaves_nothing(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []

    def interrupted(futures: Any) -> None:
        waited.append(futures)
        if len(waited) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("midstream.runtime.frontend.sync_frontend.wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([tokens(PROMPT)] * 6, greedy(2), capture=Capture(layers=[0]), use_tqdm=False)
    monkeypatch.undo()
    assert len(waited) == 2
    assert not inspect(llm).leftovers()
    output = llm.generate(
        tokens([9, 8]), greedy(2, detokenize=False), capture=Capture(layers=[0]), use_tqdm=False
    )[0]
    assert output.prompt_token_ids == [9, 8]
    assert output.receipt.status == "ok"
    inspect(llm).check_integrity()


def test_a_plan_that_went_past_the_front_door_is_refused_and_the_engine_goes_on(llm: Any) -> None:
    from vllm.v1.engine import EngineCoreRequest

    params = greedy(3, detokenize=False)
    request = llm.llm_engine.input_processor.process_inputs(
        "past", tokens(PROMPT), params, supported_tasks=("generate",)
    )
    assert isinstance(request, EngineCoreRequest)
    request.sampling_params.extra_args = {"midstream": {"capture": {"layers": [0]}}}
    with pytest.raises(SpecError, match="without having been checked"):
        llm.llm_engine.engine_core.add_request(request)
    output = llm.generate(tokens(PROMPT), params, capture=Capture(layers=[0]), use_tqdm=False)[0]
    assert output.receipt.status == "ok"


def test_requests_that_find_no_room_wait_for_it_and_are_right(
    tiny_llama: Path, uncached: Any
) -> None:
    prompt = tokens(list(range(3, 103)))
    params = greedy(3, detokenize=False)
    steers = [[Steer([0.1 * (n + 1)] * HIDDEN, layer=0)] for n in range(24)]
    expected = [
        generated(uncached.generate(prompt, params, steer=steer, use_tqdm=False)[0])
        for steer in steers
    ]
    assert len({tuple(tokens_) for tokens_ in expected}) > 1
    with engine(
        tiny_llama,
        enable_prefix_caching=True,
        block_size=32,
        max_num_seqs=24,
        midstream={"programs": 16},
    ) as small:
        waited = []
        step = small.llm_engine.step

        def watched():
            waited.append(inspect(small).waiting())
            return step()

        small.llm_engine.step = watched
        outputs = small.generate([prompt] * 24, params, steer=steers, use_tqdm=False)
        assert max(waited) > 0, "all of them found room: nothing was shown"
        assert [generated(output) for output in outputs] == expected
        assert {output.receipt.status for output in outputs} == {"ok"}
        for steer, wanted in zip(steers, expected, strict=True):
            output = small.generate(prompt, params, steer=steer, use_tqdm=False)[0]
            assert generated(output) == wanted
        inspect(small).check_integrity()
