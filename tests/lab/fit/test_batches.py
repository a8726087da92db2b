"""Batches on an `AsyncLLM` mean what they do on an `LLM`."""

import asyncio

import pytest

from midstream.errors import SpecError
from midstream.lab.fit.batches import PromptBatch, run_steps_async


class Recording:
    """An engine that returns what each request was given."""

    async def generate(self, prompt, params, **given):
        yield given


def run(count, **given):
    def steps():
        return (yield PromptBatch([[1]] * count, [None] * count, **given))

    return asyncio.run(run_steps_async(Recording(), steps()))


@pytest.mark.parametrize("name", ["edits", "probes"])
def test_a_flat_list_that_can_be_read_two_ways_is_rejected_as_on_an_llm(name):
    for count in (2, 3):
        with pytest.raises(SpecError, match=f"{name}: a flat list of 2 {name} for {count} prompts"):
            run(count, **{name: ["a", "b"]})


@pytest.mark.parametrize("name", ["edits", "probes", "capture"])
def test_lists_have_one_entry_per_prompt(name):
    assert [one[name] for one in run(2, **{name: [["a"], None]})] == [["a"], None]
    assert [one[name] for one in run(2, **{name: (["a"], ["b"])})] == [["a"], ["b"]]
    assert [one[name] for one in run(3, **{name: "a"})] == ["a"] * 3
    with pytest.raises(SpecError, match=f"{name}: 2 entries for 3 prompts; give one, or one each"):
        run(3, **{name: [["a"], ["b"]]})


def test_one_prompt_and_one_edit_may_come_as_a_flat_list():
    assert run(1, edits=["a", "b"])[0]["edits"] == ["a", "b"]
    assert [one["edits"] for one in run(2, edits=["a"])] == [["a"]] * 2
