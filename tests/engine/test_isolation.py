"""Requests do not see each other: one batch, one engine, one after another."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_view import inspect
from support.engines import ALL_SITES, engine, generated, greedy, tokens

from midstream import Capture, Positions, SpecError, Steer

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
    positions = ["all", "prompt", "generated", "last_prompt", "last", 1, [0, -1], slice(1, None, 3)]
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


def ask(llm: Any, requests: list[dict[str, Any]], params: Any) -> list[Any]:
    return llm.generate(
        [tokens(request["prompt"]) for request in requests],
        params,
        capture=[request["capture"] for request in requests],
        steer=[request["steer"] for request in requests],
        use_tqdm=False,
    )


def assert_same(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    assert generated(found) == generated(expected)
    if expected.activations is None:
        assert found.activations is None
        return
    assert set(found.activations) == set(expected.activations)
    for tap, value in expected.activations.items():
        assert torch.equal(
            found.activations.positions_of(*tap), expected.activations.positions_of(*tap)
        )
        torch.testing.assert_close(
            found.activations[tap], value, rtol=tolerance, atol=tolerance * float(value.abs().max())
        )


def test_in_one_mixed_batch_every_request_gets_what_it_gets_alone(tiny_llama: Path) -> None:
    """With steps of 16 tokens, prompts of up to 40 are computed in chunks, beside decodes."""
    requests = some_requests(24, seed=16)
    params = greedy(7, detokenize=False)
    with engine(tiny_llama, max_num_batched_tokens=16, max_num_seqs=8) as llm:
        together = ask(llm, requests, params)
        for request, output in zip(requests, together, strict=True):
            assert_same(output, ask(llm, [request], params)[0])
        inspect(llm).check_integrity()


def test_chunked_prefill_gives_the_rows_of_a_prefill_in_one_piece(
    llm: Any, tiny_llama: Path
) -> None:
    requests = some_requests(12, seed=3)
    params = greedy(6, detokenize=False)
    with engine(tiny_llama, max_num_batched_tokens=16, max_num_seqs=4) as chunked:
        for found, expected in zip(
            ask(chunked, requests, params), ask(llm, requests, params), strict=True
        ):
            assert_same(found, expected)


def test_more_than_ten_prompts_come_back_in_order_each_with_its_own_rows(llm: Any) -> None:
    prompts = [[5 + nth, 60 + nth, 120 + nth] for nth in range(24)]
    outputs = llm.generate(
        [tokens(prompt) for prompt in prompts],
        greedy(3, detokenize=False),
        capture=Capture(layers="all", positions="prompt"),
        use_tqdm=False,
    )
    assert [output.prompt_token_ids for output in outputs] == prompts
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.activations.token_ids.tolist() == prompt
        alone = llm.generate(
            tokens(prompt),
            greedy(3, detokenize=False),
            capture=Capture(layers="all", positions="prompt"),
            use_tqdm=False,
        )[0]
        assert_same(output, alone)


def test_sampling_params_are_not_changed_and_can_be_used_again(llm: Any) -> None:
    params = greedy(4, detokenize=False, extra_args={"theirs": 1})
    before = copy.deepcopy(params)
    prompt = tokens([7, 8, 9])
    steer = [Steer([9.0] * HIDDEN, layer=1)]
    first = llm.generate(prompt, params, steer=steer, use_tqdm=False)[0]
    second = llm.generate(prompt, params, steer=steer, use_tqdm=False)[0]
    plain = llm.generate(prompt, params, use_tqdm=False)[0]
    assert generated(first) == generated(second) != generated(plain)
    assert params == before
    assert params.extra_args == {"theirs": 1}
    assert plain.receipt is None


def test_two_engines_in_one_process_keep_to_themselves(llm: Any, tiny_models: Path) -> None:
    from support import tiny

    other = tiny.make("gpt2", tiny_models)
    prompt, params = tokens([11, 12, 13, 14]), greedy(4, detokenize=False)
    everything = Capture(layers="all", sites="resid_post")
    alone = llm.generate(prompt, params, capture=everything, use_tqdm=False)[0]
    with engine(other, midstream={"sites": ["resid_post"], "layers": [0, 2]}) as second:
        theirs = second.generate(
            prompt, params, capture=everything, steer=[Steer([2.0] * HIDDEN, layer=0)],
            use_tqdm=False,
        )[0]  # fmt: skip
        mine = llm.generate(prompt, params, capture=everything, use_tqdm=False)[0]
        assert theirs.activations.layers == (0, 2)
        assert_same(mine, alone, tolerance=0)
        with pytest.raises(SpecError, match="not tapped"):
            second.generate(prompt, params, capture=Capture(layers=[1]), use_tqdm=False)
    assert_same(llm.generate(prompt, params, capture=everything, use_tqdm=False)[0], alone, 0)


def test_several_completions_of_one_prompt_each_have_their_own_rows(llm: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(
        n=12, temperature=1.5, seed=3, max_tokens=5, ignore_eos=True, detokenize=False
    )
    prompt = [5, 6, 7]
    steer = [Steer([3.0] * HIDDEN, layer=0, phase="generated")]
    output = llm.generate(
        tokens(prompt), params, capture=Capture(layers=[2]), steer=steer, use_tqdm=False
    )[0]
    assert [completion.index for completion in output.outputs] == list(range(12))
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 3
    for completion in output.outputs:
        ids = [*prompt, *completion.token_ids][:-1]
        assert completion.activations.token_ids.tolist() == ids
        assert completion.receipt.edited.applied == 4
        # The same tokens, fed as a prompt whose tail is steered as those were.
        replay = llm.generate(
            tokens(ids),
            greedy(1, detokenize=False),
            capture=Capture(layers=[2]),
            steer=[Steer([3.0] * HIDDEN, layer=0, positions=slice(3, None))],
            use_tqdm=False,
        )[0]
        torch.testing.assert_close(
            completion.activations["resid_post", 2],
            replay.activations["resid_post", 2],
            rtol=1e-4,
            atol=1e-4,
        )


def test_position_limits_hold_over_prompt_and_decode(llm: Any) -> None:
    """The difference that edits make at their own site is exactly where they were asked for."""
    prompt = [9, 8, 7, 6, 5]
    params = greedy(1, detokenize=False)
    vector = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    everything = Capture(layers=[1])
    plain = llm.generate(tokens(prompt), params, capture=everything, use_tqdm=False)[0]
    for positions, expected in (
        (2, [2]),
        (-1, [4]),
        ([0, -2], [0, 3]),
        (slice(1, 3), [1, 2]),
        (slice(-3, -1), [2, 3]),
        (Positions("all", phase="prompt"), [0, 1, 2, 3, 4]),
        ("last_prompt", [4]),
    ):
        steered = llm.generate(
            tokens(prompt), params, capture=everything,
            steer=[Steer(vector, layer=1, scale=2.0, positions=positions)], use_tqdm=False,
        )[0]  # fmt: skip
        moved = steered.activations["resid_post", 1] - plain.activations["resid_post", 1]
        where = moved.abs().amax(dim=1) > 1e-3
        assert where.nonzero().squeeze(1).tolist() == expected
        torch.testing.assert_close(
            moved[where], (2 * vector).expand(len(expected), -1), rtol=1e-3, atol=1e-3
        )
