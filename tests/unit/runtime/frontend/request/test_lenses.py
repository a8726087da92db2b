"""What the front end makes of lenses: ids of texts, and the rows that they read in a step."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.readings import readings
from support.stored import worker_info
from support.tokenizers import metaspace

from midstream import Lens, Logits
from midstream.errors import SpecError
from midstream.plan import ModelShape, Plan, Prompt
from midstream.plan.resolve.resolve import resolve
from midstream.runtime.frontend.request.readouts import bound, finished, readout_rows

TAPS = tuple(("resid_post", layer) for layer in range(4))
SHAPE = ModelShape(4, 8, TAPS)
TOKENIZER = metaspace("first")
CAT, THE = TOKENIZER.convert_tokens_to_ids(["▁cat", "▁the"])


ENGINE = readings([worker_info(taps=TAPS)], TOKENIZER)
WITHOUT = readings([worker_info(taps=TAPS)])


def config(drafts: int | None = None) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        lora_config=None,
        model_config=SimpleNamespace(get_vocab_size=lambda: 40),
        speculative_config=drafts and SimpleNamespace(num_speculative_tokens=drafts),
    )


def test_texts_of_tokens_become_ids() -> None:
    plain = Plan.make(capture=Lens(0, tokens=[3]))
    assert bound(plain, WITHOUT) is plain
    plan = Plan.make(capture=[Lens(0), Lens(0, tokens=[" the", 3, " cat"], name="a")])
    found = bound(plan, ENGINE)
    assert found is not None
    assert [one.tokens for one in found.captures] == [(), (THE, 3, CAT)]
    with pytest.raises(SpecError, match="needs a tokenizer") as caught:
        bound(plan, WITHOUT)
    assert caught.value.path == "capture[1].tokens[0]"
    for capture in (Lens(0, tokens=" he"), Logits(tokens=" he")):
        with pytest.raises(
            SpecError, match="' he' is 3 tokens, '' 'h' 'e'; give a text that is one"
        ):
            bound(Plan.make(capture=capture), ENGINE)
    logits = bound(Plan.make(capture=Logits(tokens=[" the", 3])), ENGINE)
    assert logits is not None
    assert logits.captures == (Logits(tokens=[THE, 3]),)


@pytest.mark.parametrize(
    ("lens", "rows"),
    [
        (Lens(), 4 * 10),
        (Lens([0, 3], positions=slice(1, 4)), 2 * 3),
        (Lens(2, positions="last_prompt"), 1),
        (Lens(phase="generated"), 4),
        (Lens(2, positions=slice(0, None)), 10),
    ],
)
def test_the_rows_of_a_step_are_positions_times_layers(lens: Lens, rows: int) -> None:
    plan = resolve(Plan.make(capture=lens), SHAPE, Prompt(10), 5)
    workers = [worker_info(taps=TAPS, step_tokens=32)]
    assert readout_rows(plan, config(), workers, False) == rows
    layers = len(plan.captures[0].taps)
    assert readout_rows(plan, config(3), workers, False) == max(rows, 4 * layers)
    assert readout_rows(plan, config(), workers, True) == 32 * layers
    assert readout_rows(plan, config(), [worker_info(taps=TAPS, step_tokens=8)], False) == min(
        rows, 8 * layers
    )


def test_layers_of_other_stages_than_the_last_are_refused() -> None:
    workers = [worker_info(stage=0, taps=TAPS[:2]), worker_info(stage=1, taps=TAPS[2:])]
    known = readings(workers)
    plan = Plan.make(capture=Lens([2, 3]))
    finished(resolve(plan, SHAPE, Prompt(10), 5), plan, known)
    plan = Plan.make(capture=Lens([1, 3]))
    with pytest.raises(SpecError, match=r"layer 1 is on another .* of the last stage: \[2, 3\]"):
        finished(resolve(plan, SHAPE, Prompt(10), 5), plan, known)
