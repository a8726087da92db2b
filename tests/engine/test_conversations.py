"""Gates that hold for a conversation, compared with a loop over the tokens of its requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.edit_cases import Case, Maker, problems
from support.engines import generated, greedy, tokens
from support.gate_memory import LONG, Turn
from support.oracle import Oracle
from support.oracle_edits import EVERY_SITE, PLACES, At, EditOracle
from support.scheduling import chunks
from support.turns import FIRST, OPENS, Turns
from support.updating import Stepped

from midstream import Capture, Gate, Reading, SamplingParams, SpecError, Steer
from midstream.runtime.frontend.conversations import Conversations

TOLERANCE, TIE = 1e-4, 1e-3
COUNT = 6
OTHER = [44, 8, 150, 9, 3, 61, 7]
MORE = [12, 90, 4, 33]
PLACES_OF = {"all": {}, "generated": {"phase": "generated"}}
MEMORIES: dict[str, dict[str, Any]] = {
    "latch": {},
    "smooth": {"smooth": 0.3},
    "all": {"smooth": 0.6, "release": -0.5},
}


def remember(front: Any, conversations: Conversations) -> None:
    """Let an engine's front end have these conversations."""
    front.conversations = front.plans._conversations = conversations


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path) -> EditOracle:
    return EditOracle(tiny_llama, PLACES["llama"])


@pytest.fixture
def talks(wide: Any) -> Iterator[Any]:
    """The engine, without conversations of other tests."""
    front = wide._front_end
    before = front.conversations
    remember(front, Conversations())
    yield wide
    remember(front, before)


@dataclass
class Talk:
    """A conversation: its gate, and where it is."""

    name: str
    gate: Gate
    where: dict[str, Any]
    turn: Turn
    prompt: list[int]

    def case(self) -> Case:
        end = len(self.prompt)
        is_all = not self.where
        at = At(self.gate, lambda p: is_all or p >= end, self.turn)
        return Case(self.name, self.prompt, [at])

    def go_on(self, answer: list[int], more: list[int], continues: bool) -> None:
        """Let the next request begin with all tokens so far, or with others."""
        length = len(self.prompt) + len(answer) - 1
        self.turn = self.turn.next(continues, length)
        self.prompt = [*self.prompt, *answer, *more] if continues else list(more)


def gate(oracle: EditOracle, nth: int, where: dict[str, Any], hold: str, **memory: Any) -> Gate:
    """A gate that reads what is before its edit, and opens at one token of the first request: that
    of the largest average.
    """
    plain = oracle.run([*LONG, *oracle.generate(LONG, COUNT)][:-1])
    maker = Maker(("resid_post", 1), plain, torch.Generator().manual_seed(nth))
    read = ("resid_post", 1) if nth % 2 else ("resid_mid", 1)
    direction = maker.direction(read)
    averages: list[float] = []
    for score in (plain.values[read] @ direction)[len(LONG) if where else 0 :].tolist():
        last = averages[-1] if averages else score
        averages.append(last + memory.get("smooth", 1.0) * (score - last))
    second, largest = sorted(averages)[-2:]
    threshold = (second + largest) / 2
    if "release" in memory:
        memory["release"] += threshold
    place = {} if nth % 2 else {"site": read[0], "layer": read[1]}
    edit = Steer(maker.vector(), scale=0.8, **maker.place, **where)
    return Gate(edit, Reading(direction, 0.0, **place), threshold, hold=hold, **memory)


def made(oracle: EditOracle) -> list[Talk]:
    found = []
    for place, where in PLACES_OF.items():
        for nth, (name, memory) in enumerate(MEMORIES.items()):
            hold = f"conversation:{place}/{name}"
            one = gate(oracle, nth, where, hold, **memory)
            found.append(Talk(hold, one, where, Turn(), list(LONG)))
    return found


def run_turn(llm: Any, oracle: EditOracle, talks: list[Talk]) -> list[Any]:
    """One request of each conversation, compared with the replay."""
    outputs = llm.generate(
        [tokens(one.prompt) for one in talks],
        greedy(COUNT, logprobs=3, detokenize=False),
        edits=[[one.gate] for one in talks],
        capture=Capture("all", EVERY_SITE, phase="generated"),
        use_tqdm=False,
    )
    for one, output in zip(talks, outputs, strict=True):
        assert output.receipt.status == "ok"
        ids = [*one.prompt, *generated(output)][:-1]
        case = one.case()
        seen = oracle.run(ids, case.edits)
        for tap, rows in output.activations.items():
            torch.testing.assert_close(
                rows, seen.values[tap][len(one.prompt) :], rtol=1e-3, atol=1e-4, msg=one.name
            )
        chosen = seen.logits[len(one.prompt) - 1 :].gather(
            1, torch.tensor(generated(output))[:, None]
        )
        best = seen.logits[len(one.prompt) - 1 :].max(-1).values
        assert (best - chosen[:, 0] < TIE).all(), one.name
        (carried,) = output.receipt.carried
        assert carried.is_open == one.turn.end[1], one.name
    return outputs


def matters(oracle: EditOracle, one: Talk, output: Any) -> bool:
    """Whether the request would be another one if its gate had begun anew."""
    ids = [*one.prompt, *generated(output)][:-1]
    case = one.case()
    anew = At(one.gate, case.edits[0].where, Turn())
    return not torch.equal(oracle.run(ids, case.edits).logits, oracle.run(ids, [anew]).logits)


@pytest.mark.parametrize("size", [5, 64])
def test_a_gate_goes_on_where_the_request_before_ended(
    talks: Any, oracle: EditOracle, size: int
) -> None:
    """Two requests that go on, one with another prompt, and one that goes on from that."""
    every = made(oracle)
    differ = 0
    with chunks(talks, size):
        for nth, (more, continues) in enumerate(
            [(MORE, True), (MORE[::-1], True), (OTHER, False), (MORE, True)]
        ):
            outputs = run_turn(talks, oracle, every)
            for one, output in zip(every, outputs, strict=True):
                (carried,) = output.receipt.carried
                expected = one.turn.length if nth else None
                assert (carried.conversation, carried.position) == (
                    one.name.removeprefix("conversation:"), expected,
                )  # fmt: skip
                differ += matters(oracle, one, output)
                one.go_on(list(generated(output)), more, continues)
    assert differ >= 6, f"{differ} requests show what the state of the one before does"


def test_the_prompt_of_a_conversation_comes_from_the_prefix_cache(
    talks: Any, oracle: EditOracle
) -> None:
    one = next(talk for talk in made(oracle) if talk.where)
    (first,) = run_turn(talks, oracle, [one])
    one.go_on(list(generated(first)), MORE, True)
    (second,) = run_turn(talks, oracle, [one])
    assert second.num_cached_tokens == 32


def test_a_request_that_is_preempted_starts_from_the_same_state(
    talks: Any, oracle: EditOracle
) -> None:
    every = made(oracle)
    for one, output in zip(every, run_turn(talks, oracle, every), strict=True):
        one.go_on(list(generated(output)), MORE, True)
    run = Stepped(talks)
    params = greedy(COUNT, logprobs=3, detokenize=False)
    for one in every:
        run.add(one.name, one.prompt, params, edits=[one.gate], capture=Capture("all", EVERY_SITE))
    run.step(3)
    assert talks.llm_engine.reset_prefix_cache(reset_running_requests=True)
    with chunks(talks, 16):
        outputs = run.finish()
    for one in every:
        assert not problems(oracle, one.case(), outputs[one.name], TOLERANCE, TIE)
        (carried,) = outputs[one.name].receipt.carried
        assert carried.position == one.turn.length
        assert carried.is_open == one.turn.end[1]


def open_gate(hold: str, **where: Any) -> Gate:
    """A gate that opens at the first token that it reads."""
    return Gate(
        Steer(torch.ones(tiny.HIDDEN), "all", **where), Reading(torch.ones(tiny.HIDDEN), 1e6), 0.0,
        hold=hold,
    )  # fmt: skip


def carried(llm: Any, edits: Any, prompt: list[int] = OTHER, **request: Any) -> list[Any]:
    output = llm.generate(
        {"prompt_token_ids": prompt, **request}, greedy(2, detokenize=False), edits=edits,
        use_tqdm=False,
    )[0]  # fmt: skip
    assert output.receipt.status == "ok"
    return [(one.conversation, one.layer, one.position, one.is_open) for one in
            output.receipt.carried]  # fmt: skip


def test_a_conversation_is_of_a_gate_that_reads_the_same_and_of_one_cache_salt(talks: Any) -> None:
    one = open_gate("conversation:a")
    layers = range(tiny.LAYERS)
    assert carried(talks, one) == [("a", layer, None, True) for layer in layers]
    stronger = replace(one, edit=one.edit.replace(scale=3.0, phase="prompt"))
    assert carried(talks, stronger) == [("a", layer, 0, True) for layer in layers]
    first_layer = replace(one, edit=one.edit.replace(layer=0))
    assert carried(talks, first_layer) == [("a", 0, 0, True)]
    for other in (replace(one, threshold=1.0), replace(one, hold="conversation:b")):
        assert {where[2] for where in carried(talks, other)} == {None}
    assert {where[2] for where in carried(talks, one, cache_salt="theirs")} == {None}
    assert carried(talks, replace(one, hold="rest")) == []


def test_a_state_that_was_evicted_begins_anew_and_the_receipt_says_so(talks: Any) -> None:
    remember(talks._front_end, Conversations(most=2))
    gates = [
        replace(one, edit=one.edit.replace(layer=0))
        for one in map(open_gate, ["conversation:a", "conversation:b", "conversation:c"])
    ]
    assert [carried(talks, one)[0][2] for one in gates] == [None, None, None]
    assert [carried(talks, gates[nth])[0][2] for nth in (2, 1, 0)] == [0, 0, None]
    assert len(talks._front_end.conversations) == 2


def test_a_turn_goes_on_where_one_ended_whose_results_were_not_fetched_yet(talks: Any) -> None:
    """Results of ended requests are fetched together, while others run."""
    run, one = Stepped(talks), open_gate("conversation:a")
    run.add("other", OTHER[::-1], greedy(40, detokenize=False), edits=[])
    run.add("first", OTHER, greedy(2, detokenize=False), edits=[one])
    while "first" not in run.outputs:
        run.step()
    prompt = [*OTHER, *generated(run.outputs["first"]), 5]
    run.add("second", prompt, greedy(2, detokenize=False), edits=[one])
    receipt = run.finish()["second"].receipt
    assert {each.position for each in receipt.carried} == {len(OTHER) + 1}


def test_of_turns_at_the_same_time_the_one_that_ends_last_is_gone_on_with(
    talks: Any, tiny_llama: Path
) -> None:
    one = Turns(Oracle(tiny_llama, "model.layers", "post_attention_layernorm")).gate("a")
    stays, opens = list(FIRST), [*FIRST, OPENS]
    for longer, shorter in ((stays, opens), (opens, stays)):
        remember(talks._front_end, Conversations())
        run = Stepped(talks)
        run.add("longer", longer, greedy(6, detokenize=False), edits=[one])
        run.add("shorter", shorter, greedy(2, detokenize=False), edits=[one])
        outputs = run.finish()
        for name, prompt in (("longer", longer), ("shorter", shorter)):
            (left,) = outputs[name].receipt.carried
            assert (left.position, left.is_open) == (None, prompt is opens)
        assert carried(talks, one, list(FIRST)) == [("a", 0, 0, longer is opens)]


def test_an_aborted_request_leaves_the_conversation_as_it_was(talks: Any) -> None:
    run, engine = Stepped(talks), talks.llm_engine
    params = greedy(COUNT, detokenize=False)
    run.add("gone", OTHER, params, edits=[open_gate("conversation:a")])
    run.step(2)
    engine.abort_request(["gone"])
    run.finish()
    assert carried(talks, open_gate("conversation:a"))[0][2] is None


def test_an_update_keeps_the_state_that_the_request_began_with(talks: Any) -> None:
    one = open_gate("conversation:a")
    carried(talks, one)
    run = Stepped(talks)
    run.add("a", OTHER, greedy(COUNT), edits=[one])
    run.step(2)
    talks.update("a", scale=0.5)
    with pytest.raises(SpecError, match="gates with memory .hold, smooth, release. are those"):
        talks.update("a", edits=[replace(one, hold="conversation:b")])
    (output,) = run.finish().values()
    assert {each.position for each in output.receipt.carried} == {0}
    assert [each.source for each in output.receipt.versions] == ["request", "update"]


def test_what_has_no_conversation_is_rejected_by_name(talks: Any) -> None:
    one = open_gate("conversation:a")
    with pytest.raises(SpecError, match=r"edits.hold: a conversation goes on with one comp"):
        talks.generate(tokens(OTHER), SamplingParams(n=2, max_tokens=2), edits=one, use_tqdm=False)
    for give in (
        lambda: talks.steering.set(base=one),
        lambda: talks.steering.set(generated=[one.to_dict()]),
        lambda: talks.vectors.register("talk", {"edits": [one]}),
    ):
        with pytest.raises(SpecError, match='given with each of its requests, .* use "rest"'):
            give()
    twice = [one, replace(one, edit=one.edit.replace(phase="generated"))]
    with pytest.raises(SpecError, match=r"edits\[1\]\.hold: two gates of the conversation 'a'"):
        talks.generate(tokens(OTHER), greedy(2), edits=twice, use_tqdm=False)
