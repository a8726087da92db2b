"""`AsyncLLM(layers=…)`: hidden states that grow with the tokens, compared with transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.async_calls import results_of
from support.oracle import Oracle

LAYERS = (1, 2)


@pytest.fixture(scope="module")
def found(talking_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of("system.default_async", talking_llama, tmp_path_factory.mktemp("default"))


def generated(outputs: list[dict[str, Any]], is_delta: bool) -> list[int]:
    if is_delta:
        return [token for one in outputs for token in one["tokens"]]
    return outputs[-1]["tokens"]


def assert_rows(oracle: Oracle, rows: Any, tokens: list[int], positions: slice) -> None:
    """The rows of each layer are transformers' at these positions."""
    _, theirs = oracle.run(tokens)
    assert set(rows) == set(LAYERS)
    for layer in LAYERS:
        expected = theirs["resid_post", layer][positions]
        torch.testing.assert_close(rows[layer], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["plain", "at once", "delta", "final"])
def test_each_output_has_the_rows_of_the_tokens_so_far(found, talking_oracle, name):
    outputs, is_delta = found[name], name == "delta"
    prompt = outputs[0]["prompt"]
    every = [*prompt, *generated(outputs, is_delta)]
    assert len(every) == len(prompt) + 12
    count = shown = 0
    for one in outputs:
        assert one["aliases"]
        count = count + len(one["tokens"]) if is_delta else len(one["tokens"])
        stop = len(prompt) + count - 1
        if is_delta and not one["finished"]:
            has_prompt = shown == 0
            assert_rows(talking_oracle, one["hidden"], every, slice(max(shown, len(prompt)), stop))
            prefill = slice(0, len(prompt) if has_prompt else 0)
            assert_rows(talking_oracle, one["prefill"], every, prefill)
            shown = stop
        else:
            assert_rows(talking_oracle, one["hidden"], every, slice(len(prompt), stop))
            assert_rows(talking_oracle, one["prefill"], every, slice(0, len(prompt)))
    assert outputs[-1]["finished"]
    assert len(outputs) == 1 if name == "final" else len(outputs) > 1


def test_calls_without_a_request_id_have_different_ones(found):
    assert found["plain"][0]["id"] != found["at once"][0]["id"]
    assert {one["id"] for one in found["plain"]} == {found["plain"][0]["id"]}


def test_last_rows_are_one_row_each(found, talking_oracle):
    prompt = found["last rows"][0]["prompt"]
    every = [*prompt, *found["last rows"][-1]["tokens"]]
    for one in found["last rows"]:
        stop = len(prompt) + len(one["tokens"]) - 1
        assert_rows(talking_oracle, one["hidden"], every, slice(max(stop - 1, len(prompt)), stop))
        assert_rows(talking_oracle, one["prefill"], every, slice(len(prompt) - 1, len(prompt)))


@pytest.mark.parametrize("name", ["with last", "one token", "stopped", "with last delta"])
def test_the_last_output_has_as_many_rows_as_tokens_on_wish(found, talking_oracle, name):
    outputs = found[name]
    prompt, tokens = outputs[0]["prompt"], generated(outputs, "delta" in name)
    assert_rows(talking_oracle, outputs[-1]["hidden"], [*prompt, *tokens], slice(len(prompt), None))
    for one in outputs[:-1]:
        assert all(len(rows) < len(tokens) for rows in one["hidden"].values())


def test_a_request_that_fills_the_context_has_one_row_less_and_a_warning(found):
    last = found["full"][-1]
    assert {len(rows) for rows in last["hidden"].values()} == {len(last["tokens"]) - 1}
    assert len(found["warned"]) == 1
    assert "give a smaller max_tokens" in found["warned"][0]


def test_remove_hooks_ends_the_default_capture(found):
    assert found["removed"] == ("mine", None, False)
