"""Thousands of requests through little room: none is wrong, and nothing is left behind."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.asking import ask
from support import tiny
from support.edit_cases import Maker
from support.engine_view import inspect
from support.engines import engine, generated, greedy, tokens
from support.nightly import rounds
from support.oracle_edits import EVERY_SITE, EditOracle, row_error

from midstream import Affine, Capture, Gate, Probe, Replace, Steer, TokenIds
from midstream.errors import SpecError
from midstream.plan import Plan

REQUESTS = rounds(suite=300, nightly=10_000)
PROMPTS = [[5, 17, 33], [150, 44, 12, 13], [9, 80, 7, 6, 5], [101, 64]]
ROOM = {
    "bank_rows": 40,
    "programs": 24,
    "max_edits": 60,
    "token_ids": 160,
    "edits_per_site": 12,
    "probes": 3,
}


@pytest.fixture(scope="module")
def llm(tiny_llama: Path, oracle: EditOracle) -> Iterator[Any]:
    with engine(
        tiny_llama,
        max_num_batched_tokens=512,
        max_num_seqs=256,
        max_model_len=32,
        midstream={"sites": list(EVERY_SITE), **ROOM},
    ) as found:
        yield found


@dataclass(frozen=True)
class Wanted:
    """One kind of request: a prompt, how many tokens, and what is asked."""

    prompt: list[int]
    count: int
    plan: dict[str, Any]

    def params(self) -> Any:
        return last_output(self.count, extra_args={"midstream": self.plan})


def last_output(count: int, **more: Any) -> Any:
    """Greedy, with one output, when the request has finished."""
    from vllm.sampling_params import RequestOutputKind

    return greedy(count, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **more)


def kinds(oracle: EditOracle) -> list[Wanted]:
    """Plans of every operation at every site, with probes and captures now and then."""
    draw = torch.Generator().manual_seed(3)
    edits: list[Any] = []
    for nth, site in enumerate(EVERY_SITE):
        maker = Maker((site, nth % 3), oracle.run(PROMPTS[2] * 2), draw)
        edits += [edit for _, edit in maker.plain_edits("all")]
        edits += [edit for _, edit, _ in maker.conditional_edits([("resid_pre", 0)])]
        ids = sorted({*range(nth, tiny.VOCAB, 4), *(prompt[0] for prompt in PROMPTS)})
        edits.append(Steer(maker.vector(), nth % 3, site=site, positions=TokenIds(ids)))
        rows = torch.stack([maker.vector() for _ in range(2)])
        edits.append(Replace(rows, nth % 3, site=site, positions=[0, 1]))
    found = []
    for nth, edit in enumerate(edits):
        probes = [Probe(torch.ones(tiny.HIDDEN), nth % 3, name="p")] if nth % 3 == 0 else None
        capture = Capture([nth % 3], EVERY_SITE[nth % len(EVERY_SITE)]) if nth % 2 else None
        other = [edits[nth - 7]] if nth % 5 == 0 and nth > 7 else []
        plan = Plan.make(capture=capture, edits=[edit, *other], probes=probes)
        assert plan is not None
        found.append(Wanted(PROMPTS[nth % 4], 1 + nth % 3, plan.to_dict()))
    return found


def assert_nothing_is_left(llm: Any) -> None:
    assert not inspect(llm).leftovers()


def assert_same(found: Any, expected: Any) -> None:
    """As far as another order of summation allows."""
    assert generated(found) == generated(expected)
    ours, theirs = (getattr(one, "activations", None) for one in (found, expected))
    assert (ours is None) == (theirs is None)
    for tap, value in (theirs or {}).items():
        assert row_error(found.activations[tap], value) < 1e-4
    for name, scores in (getattr(expected, "probes", None) or {}).items():
        torch.testing.assert_close(found.probes[name], scores, rtol=1e-3, atol=1e-3)


def test_many_requests_leave_nothing_behind_and_all_are_right(llm: Any, oracle: EditOracle) -> None:
    wanted = kinds(oracle)
    assert len(wanted) > 150
    by_hand, view = llm.llm_engine, inspect(llm)
    alone = [ask(llm, one.prompt, one.params()) for one in wanted]
    draw = random.Random(8)
    asked: dict[str, int] = {}
    open_: list[str] = []
    waited = running_aborts = waiting_aborts = number = 0
    answered: dict[str, Any] = {}
    while number < REQUESTS or by_hand.has_unfinished_requests():
        while number < REQUESTS and len(open_) < 400:
            kind = draw.randrange(len(wanted))
            for _ in range(draw.choice((1, 2, 8))):
                name = f"r{number}"
                number += 1
                if draw.random() < 0.1:
                    params = last_output(2)
                    by_hand.add_request(name, tokens(wanted[kind].prompt), params)
                else:
                    asked[name] = kind
                    by_hand.add_request(name, tokens(wanted[kind].prompt), wanted[kind].params())
                open_.append(name)
        waiting = view.waiting()
        waited = max(waited, waiting)
        if draw.random() < 0.5:
            inside = len(open_) - waiting
            running_aborts += 1
            by_hand.abort_request([open_.pop(0)])
            if view.waiting() > 5 and inside > 0:
                waiting_aborts += 2
                by_hand.abort_request([open_.pop(), open_.pop(-2)])
        for output in by_hand.step():
            assert output.finished
            assert output.request_id not in answered
            answered[output.request_id] = output
        open_ = [name for name in open_ if name not in answered]
        if number % 400 < 20:
            view.check_integrity()
    assert waited > 50, "nobody had to wait for room: the test shows little"
    assert running_aborts > REQUESTS // 500
    assert waiting_aborts > REQUESTS // 500
    assert len(answered) == number - running_aborts - waiting_aborts
    for name, output in answered.items():
        if name in asked:
            assert_same(output, alone[asked[name]])
        else:
            assert getattr(output, "receipt", None) is None
    assert_nothing_is_left(llm)
    for one, expected in zip(wanted[::10], alone[::10], strict=True):
        found = ask(llm, one.prompt, one.params())
        assert_same(found, expected)
    assert_nothing_is_left(llm)


V = torch.linspace(-1, 1, tiny.HIDDEN)


def several(count: int) -> torch.Tensor:
    return torch.randn(count, tiny.HIDDEN, generator=torch.Generator().manual_seed(count))


LIMITS = {
    "bank_rows": (
        {
            "edits": [
                Steer(row, nth % 3, site=EVERY_SITE[nth % len(EVERY_SITE)])
                for nth, row in enumerate(several(41))
            ]
        },
        "needs 41 vectors, and there is room for 40",
    ),
    "programs": (
        {"edits": [Steer(row, 0, positions=nth) for nth, row in enumerate(several(23))]},
        "needs 23 combinations of edits, and there is room for 22",
    ),
    "max_edits": (
        {
            "edits": [
                Steer(V, "all", site=list(EVERY_SITE), positions=slice(k, None)) for k in range(3)
            ]
        },
        "needs 126 instructions, and there is room for 60",
    ),
    "edits_per_site": (
        {"edits": [Affine(several(13), several(13), 1, site="mlp_out")]},
        "13 instructions for one token at mlp_out of layer 1 .* the limit is 12",
    ),
    "maps": (
        {"edits": [Affine(matrix=several(tiny.HIDDEN), layer=1)]},
        "needs 1 matrices, and there is room for 0",
    ),
    "gate_states": (
        {"edits": [Gate(Steer(V, "all"), V, hold="rest")]},
        "need 3 states .* room for 0",
    ),
    "token_ids": (
        {"edits": [Steer(V, 0, positions=TokenIds(list(range(161))))]},
        "needs 161 token ids in lists, and there is room for 160",
    ),
    "probes": (
        {"probes": [Probe(V, nth % 3, name=f"p{nth}") for nth in range(4)]},
        "4 scores .* room for 3",
    ),
}


def test_what_could_never_fit_is_refused_at_once_by_the_name_of_its_setting(llm: Any) -> None:
    prompt = tokens(range(3, 27))
    for setting, (asked, figures) in LIMITS.items():
        with pytest.raises(SpecError, match=rf"(?s){figures}.*setting {setting}\b"):
            llm.generate(prompt, greedy(3, detokenize=False), use_tqdm=False, **asked)
        assert_nothing_is_left(llm)
    output = llm.generate(
        prompt, greedy(2, detokenize=False), capture=Capture([0], "resid_post"), use_tqdm=False
    )[0]
    assert output.receipt.status == "ok"
