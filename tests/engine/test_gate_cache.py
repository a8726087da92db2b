"""What gates with memory remember is kept with the KV of the tokens they read: a prompt that is
cached is not computed again, and its next token finds them as they were.

Every answer is held against the same request on an engine without a prefix cache. A block is 32
tokens. That an edit is on at the first computed token is told by the rows captured there.
"""

import random
from typing import Any

import pytest
import torch
from support.cached_pair import SIZE, WHOLE, Pair, fresh, vector
from support.engine_view import inspect
from support.engines import generated, greedy
from support.nightly import rounds
from support.updating import Stepped

from midstream import Capture, Gate, Probe, Steer

LATE = Capture(2, positions=slice(WHOLE, None))


def gate(seed: int = 3, *, layer: int = 1, where: Any = None, **memory: Any) -> Gate:
    selected = {} if where is None else {"positions": where}
    steer = Steer(vector(2, 0.3), layer=2, **selected)
    sizes = {"threshold": 1.0, "hold": 3} | memory
    return Gate(steer, Probe(vector(seed), layer), **sizes)


def rows(output: Any) -> torch.Tensor:
    return output.activations["resid_post", 2]


FORMS: list[dict[str, Any]] = [
    {"hold": 3},
    {"hold": 40, "threshold": 40.0},
    {"hold": "rest"},
    {"smooth": 0.05, "hold": None},
    {"smooth": 0.1, "release": -1.0, "hold": 2},
    {"smooth": 0.05, "sharpness": 2.0, "hold": None},
]


def without_none(form: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in form.items() if value is not None}


@pytest.mark.parametrize("form", FORMS, ids=[str(form) for form in FORMS])
def test_a_prompt_that_comes_again_is_served_with_what_its_gate_remembers(
    pair: Pair, prompt: Any, form: dict[str, Any]
) -> None:
    mine = gate(**form) if form.get("hold") is not None else _gate(form)
    first = pair.ask(prompt, 0, edits=mine, capture=LATE, count=12)
    for _ in range(2):
        again = pair.ask(prompt, WHOLE, edits=mine, capture=LATE, count=12)
        torch.testing.assert_close(rows(again), rows(first), rtol=1e-5, atol=1e-5)
        assert again.receipt.status == "ok"
    forked = [*prompt[:70], *fresh(60)]
    pair.ask(forked, 64, edits=mine, capture=LATE)
    pair.ask(forked, 96, edits=mine, capture=LATE)


def _gate(form: dict[str, Any]) -> Gate:
    steer, probe = Steer(vector(2, 0.3), layer=2), Probe(vector(3), 1)
    return Gate(steer, probe, **{"threshold": 1.0, **without_none(form)})


@pytest.mark.parametrize(
    "other",
    [
        gate(hold=4),
        gate(threshold=1.25),
        gate(smooth=0.5),
        gate(seed=4),
        gate(layer=0),
        gate(where=slice(1, None)),
        gate(where=[*range(40), *range(41, SIZE)]),
    ],
    ids=["hold", "threshold", "smooth", "vector", "layer", "start", "gap"],
)
def test_another_gate_never_goes_on_from_what_one_remembers(
    pair: Pair, prompt: Any, other: Gate
) -> None:
    pair.ask(prompt, 0, edits=gate(), capture=LATE)
    output = pair.ask(prompt, None, edits=other, capture=LATE)
    assert output.num_cached_tokens in (0, 32)
    pair.ask(prompt, WHOLE, edits=other, capture=LATE)
    pair.ask(prompt, WHOLE, edits=gate(), capture=LATE)


def test_a_gate_of_a_plain_requests_tokens_reads_them_once(pair: Pair, prompt: Any) -> None:
    pair.ask(prompt, 0)
    pair.ask(prompt, 0, edits=gate(), capture=LATE)
    pair.ask(prompt, WHOLE)
    pair.ask(prompt, WHOLE, edits=gate(), capture=LATE)
    # Of a prompt's tokens alone, also by a longer prompt.
    mine = gate(where=slice(40, 80), hold="rest")
    pair.ask(prompt, 32, edits=mine, capture=LATE)
    pair.ask(prompt, WHOLE, edits=mine, capture=LATE)
    pair.ask([*prompt[:WHOLE], *fresh(30)], WHOLE, edits=mine, capture=LATE)


def test_generated_tokens_of_a_turn_are_served_to_the_next(pair: Pair) -> None:
    prompt = fresh(40)
    mine = gate(hold="rest", threshold=60.0)
    first = pair.ask(prompt, 0, edits=mine, count=60)
    pair.ask([*prompt, *generated(first), 7, 8, 9], 96, edits=mine, capture=LATE)


def test_gates_and_probes_of_one_request(pair: Pair, prompt: Any) -> None:
    several = {
        "edits": [[gate(), gate(4, smooth=0.2, where=slice(10, None)), Steer(vector(5, 0.1), 0)]],
        "probes": Probe(vector(6), 2, name="p"),
        "capture": LATE,
    }
    first = pair.ask(prompt, 0, **several)
    again = pair.ask(prompt, WHOLE, **several)
    torch.testing.assert_close(rows(again), rows(first), rtol=1e-5, atol=1e-5)
    assert torch.equal(again.probes["p"][:WHOLE], first.probes["p"][:WHOLE])


def soft(layer: int = 1, **selected: Any) -> Gate:
    """A gate that every token moves."""
    steer = Steer(vector(2, 0.3), layer=2, **selected)
    return Gate(steer, Probe(vector(3), layer), threshold=0.0, smooth=0.02, sharpness=0.5)


@pytest.mark.parametrize(
    "others",
    [
        [soft(layer=0)],
        [soft(positions=slice(60, None))],
        [soft(positions=slice(0, 40)), soft(positions=slice(0, 70))],
    ],
    ids=["layer", "start", "stops"],
)
def test_gates_of_one_vector_remember_each_its_own(
    pair: Pair, prompt: Any, others: list[Gate]
) -> None:
    for hit in (0, WHOLE, WHOLE):
        pair.ask(prompt, hit, edits=[[soft(), *others]], capture=LATE)


def test_a_request_in_the_step_that_computes_its_prefix_computes_it_too(
    wide: Any, uncached: Any, prompt: Any
) -> None:
    prompts = [{"prompt_token_ids": [*prompt, 5 + number]} for number in range(4)]
    outputs = [
        engine.generate(
            prompts, greedy(6, detokenize=False), use_tqdm=False, edits=gate(), capture=LATE
        )
        for engine in (wide, uncached)
    ]
    for found, expected in zip(*outputs, strict=True):
        assert found.receipt.status == "ok"
        assert generated(found) == generated(expected)
        torch.testing.assert_close(rows(found), rows(expected), rtol=1e-4, atol=1e-4)


def test_a_preempted_request_goes_on_from_what_is_kept(wide: Any, uncached: Any) -> None:
    prompts = [fresh(SIZE) for _ in range(4)]

    def run(engine: Any, stops: tuple[int, ...]) -> dict[str, Any]:
        stepped = Stepped(engine)
        for number, prompt in enumerate(prompts):
            mine = FORMS[number]
            edit = gate(**mine) if mine.get("hold") is not None else _gate(mine)
            stepped.add(f"{number}", prompt, greedy(40, detokenize=False), edits=edit)
        for stop in stops:
            stepped.step(stop)
            stepped.preempt()
        return stepped.finish()

    expected = run(uncached, ())
    for outputs in (run(wide, (8, 9)), run(wide, ())):
        for name, output in outputs.items():
            assert output.outputs[0].receipt.status == "ok"
            assert output.outputs[0].token_ids == expected[name].outputs[0].token_ids
    assert not inspect(wide).leftovers()


def test_random_gates_on_shared_prefixes_act_as_on_an_engine_without_a_cache(pair: Pair) -> None:
    draw = random.Random(7)
    trunks = [fresh(200) for _ in range(2)]
    hits, tries = 0, rounds(suite=12, nightly=30)
    for _ in range(tries):
        trunk = draw.choice(trunks)[: draw.randrange(70, 200)]
        edits = [
            [gate(hold=5, threshold=20.0)],
            [gate(smooth=0.1, where=slice(20, None)), Steer(vector(5, 0.1), 0)],
            [gate(hold="rest", threshold=50.0, where=slice(0, len(trunk)))],
            [gate(hold=2, where=slice(30, 60, 2))],
        ]
        captured = Capture(2, positions=slice(len(trunk) - 3, None))
        count = draw.choice([1, 5, 30])
        output = pair.ask(trunk, None, count=count, edits=[draw.choice(edits)], capture=captured)
        assert output.receipt.status == "ok"
        hits += output.num_cached_tokens
    assert hits > 10 * tries
    inspect(pair.cached).check_integrity()
