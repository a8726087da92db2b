"""Requests do not see each other: one batch, one engine, one after another."""

import copy
from typing import Any

import pytest
import torch
from engine.asking import ask, ask_all
from support import tiny
from support.engines import ALL_SITES, engine, generated, greedy

from midstream import Capture, Steer
from midstream.errors import SpecError
from midstream.plan import Positions

HIDDEN = 64


def some_prompts(count: int, seed: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randint(
            3, 199, (int(torch.randint(2, 40, (1,), generator=draw)),), generator=draw
        ).tolist()
        for _ in range(count)
    ]


def some_requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Plain ones, captures, edits and both, of every kind that there is."""
    draw = torch.Generator().manual_seed(seed)
    positions = [
        "all",
        "prompt",
        "generated",
        "last_prompt",
        "last_row",
        1,
        [0, -1],
        slice(1, None, 3),
    ]
    found = []
    for nth, prompt in enumerate(some_prompts(count, seed)):
        request: dict[str, Any] = {"prompt": prompt, "capture": None, "steer": None}
        if nth % 3 != 0:
            request["capture"] = [
                Capture(layers=[nth % 3], sites=ALL_SITES[nth % 3], positions=positions[nth % 8]),
                Capture(layers="all", positions="last_prompt"),
            ]
        if nth % 4 != 1:
            request["steer"] = [
                Steer(
                    torch.randn(HIDDEN, generator=draw) * 3,
                    layer=(nth + k) % 3,
                    site=ALL_SITES[(nth + k) % 3],
                    scale=0.5 + k,
                    phase=("all", "prompt", "generated")[(nth + k) % 3],
                )
                for k in range(1 + nth % 2)
            ]
        found.append(request)
    return found


def ask_each(llm: Any, requests: list[dict[str, Any]], params: Any) -> list[Any]:
    asked = {name: [request[name] for request in requests] for name in ("capture", "steer")}
    return ask_all(llm, [request["prompt"] for request in requests], params, **asked)


def assert_same(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    assert generated(found) == generated(expected)
    if not hasattr(expected, "activations"):
        assert not hasattr(found, "activations")
        return
    assert set(found.activations) == set(expected.activations)
    for tap, value in expected.activations.items():
        assert torch.equal(
            found.activations.positions_of(*tap), expected.activations.positions_of(*tap)
        )
        torch.testing.assert_close(
            found.activations[tap], value, rtol=tolerance, atol=tolerance * float(value.abs().max())
        )


def test_chunked_prefill_gives_the_rows_of_a_prefill_in_one_piece(llm, tiny_llama):
    requests = some_requests(24, seed=3)
    with engine(tiny_llama, max_num_batched_tokens=16, max_num_seqs=4) as chunked:
        for found, expected in zip(
            ask_each(chunked, requests, 6), ask_each(llm, requests, 6), strict=True
        ):
            assert_same(found, expected)


def test_more_than_ten_prompts_come_back_in_order_each_with_its_own_rows(llm):
    prompts = [[5 + nth, 60 + nth, 120 + nth] for nth in range(24)]
    capture = Capture(layers="all", positions="prompt")
    outputs = ask_all(llm, prompts, 3, capture=capture)
    assert [output.prompt_token_ids for output in outputs] == prompts
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.activations.token_ids.tolist() == prompt
        assert_same(output, ask(llm, prompt, 3, capture=capture))


def test_sampling_params_are_not_changed_and_can_be_used_again(llm):
    params = greedy(4, detokenize=False, extra_args={"theirs": 1})
    before = copy.deepcopy(params)
    steer = [Steer([9.0] * HIDDEN, layer=1)]
    first, second = (ask(llm, [7, 8, 9], params, steer=steer) for _ in range(2))
    plain = ask(llm, [7, 8, 9], params)
    assert generated(first) == generated(second) != generated(plain)
    assert params == before
    assert params.extra_args == {"theirs": 1}
    assert not hasattr(plain, "receipt")


def test_two_engines_in_one_process_keep_to_themselves(llm, tiny_models):
    other, prompt = tiny.make("gpt2", tiny_models), [11, 12, 13, 14]
    everything = Capture(layers="all", sites="resid_post")
    alone = ask(llm, prompt, capture=everything)
    with engine(other, midstream={"sites": ["resid_post"], "layers": [0, 2]}) as second:
        steer = [Steer([2.0] * HIDDEN, layer=0)]
        theirs = ask(second, prompt, capture=everything, steer=steer)
        assert theirs.activations.layers == (0, 2)
        assert_same(ask(llm, prompt, capture=everything), alone, tolerance=0)
        with pytest.raises(SpecError, match="not tapped"):
            ask(second, prompt, capture=Capture(layers=[1]))
    assert_same(ask(llm, prompt, capture=everything), alone, tolerance=0)


def test_several_completions_of_one_prompt_each_have_their_own_rows(llm):
    from vllm import SamplingParams

    params = SamplingParams(
        n=12, temperature=1.5, seed=3, max_tokens=5, ignore_eos=True, detokenize=False
    )
    prompt, steer = [5, 6, 7], Steer([3.0] * HIDDEN, layer=0)
    capture = Capture(layers=[2])
    output = ask(llm, prompt, params, capture=capture, steer=[steer.replace(phase="generated")])
    assert [completion.index for completion in output.outputs] == list(range(12))
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 3
    for completion in output.outputs:
        ids = [*prompt, *completion.token_ids][:-1]
        assert completion.activations.token_ids.tolist() == ids
        assert completion.receipt.edited.applied == 4
        later = [steer.replace(positions=slice(3, None))]
        replay = ask(llm, ids, 1, capture=capture, steer=later)
        torch.testing.assert_close(
            completion.activations["resid_post", 2],
            replay.activations["resid_post", 2],
            rtol=1e-4,
            atol=1e-4,
        )


def test_position_limits_hold_over_prompt_and_decode(llm):
    prompt, rows = [9, 8, 7, 6, 5], Capture(layers=[1])
    vector = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    plain = ask(llm, prompt, 1, capture=rows)
    for positions, expected in (
        (2, [2]),
        (-1, [4]),
        ([0, -2], [0, 3]),
        (slice(1, 3), [1, 2]),
        (slice(-3, -1), [2, 3]),
        (Positions("all", phase="prompt"), [0, 1, 2, 3, 4]),
        ("last_prompt", [4]),
    ):
        steer = [Steer(vector, layer=1, scale=2.0, positions=positions)]
        steered = ask(llm, prompt, 1, capture=rows, steer=steer)
        moved = steered.activations["resid_post", 1] - plain.activations["resid_post", 1]
        where = moved.abs().amax(dim=1) > 1e-3
        assert where.nonzero().squeeze(1).tolist() == expected
        torch.testing.assert_close(
            moved[where], (2 * vector).expand(len(expected), -1), rtol=1e-3, atol=1e-3
        )
