"""A live engine, and those who mean it no good: each is refused, none is felt by anybody else."""

import random
from typing import Any

import pytest
import torch
from support.engine_view import inspect
from support.engines import engine, generated, greedy, tokens
from support.hostile import hostile_plans
from support.nightly import rounds

from midstream import Steer
from midstream.errors import SpecError
from midstream.runtime.protocol.rpc import CheckIntegrity, ReleaseRequests, arguments_of

HIDDEN, LAYERS, PROMPT = 64, 3, [5, 9, 7, 6, 8, 12]
COUNT = rounds(suite=160, nightly=2000)


@pytest.fixture(scope="module")
def llm(tiny_llama):
    with engine(tiny_llama, midstream={"sites": ["resid_pre", "resid_post"]}) as found:
        yield found


def ask(llm, plan, max_tokens=4, prompt=PROMPT):
    params = greedy(max_tokens, extra_args={"midstream": plan})
    return llm.generate(tokens(prompt), params, use_tqdm=False)[0]


def refuses(llm, plan) -> bool:
    try:
        ask(llm, plan)
    except SpecError:
        return True
    except Exception as error:  # noqa: BLE001 - not every vLLM has this type of error
        # vLLM itself refuses numbers that do not fit into 64 bits.
        return "extra_args integers" in str(error)
    return False


def _misfit(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A plan in which nothing is malformed, that this engine or this prompt does not fit."""
    steer: dict[str, Any] = {"op": "steer", "vector": [1.0] * HIDDEN, "layer": 1}
    read: dict[str, Any] = {"layers": [0]}
    narrow = [1.0] * draw.choice([1, HIDDEN - 1, HIDDEN + 1, 4096])
    beyond = draw.choice([LAYERS, LAYERS + 7, -LAYERS - 1, 2**31])
    made: list[tuple[str, dict[str, Any]]] = [
        ("width", {"edits": {**steer, "vector": narrow}}),
        ("layer", {"edits": {**steer, "layer": beyond}}),
        ("layer", {"capture": {"layers": [0, beyond]}}),
        ("not tapped", {"capture": {**read, "sites": "resid_mid"}}),
        ("not tapped", {"edits": {**steer, "site": "mlp_out"}}),
        ("positions", {"capture": {**read, "positions": [draw.choice([10, 99, -7, 2**31])]}}),
        ("positions", {"edits": {**steer, "positions": {"slice": [40, 50]}}}),
        ("last_row", {"edits": {**steer, "positions": "last_row"}}),
        ("name", {"edits": {**steer, "vector": {"name": "nobody"}}}),
        ("zero", {"edits": {"op": "ablate", "directions": [0.0] * HIDDEN, "layer": 1}}),
        ("role", {"capture": {**read, "positions": {"role": "user"}}}),
        ("limit", {"edits": [steer] * draw.choice([65, 1024])}),
        ("slots", {"probes": [_probe(nth) for nth in range(draw.choice([17, 500]))]}),
    ]
    return draw.choice(made)


def _probe(nth: int) -> dict[str, Any]:
    return {"direction": [1.0] * HIDDEN, "layer": 1, "name": f"p{nth}"}


def test_hostile_plans_are_refused_and_a_good_request_right_after_works(llm):
    good = {"capture": {"layers": "all"}, "edits": [Steer([0.5] * HIDDEN, 1).to_dict()]}
    expected = ask(llm, good)
    draw = random.Random(11)
    spoilt = hostile_plans(7, COUNT // 2, width=HIDDEN, layers=LAYERS, prompt=len(PROMPT))
    kinds = set()
    for nth, one in enumerate(spoilt):
        for kind, plan in (one, _misfit(draw)):
            kinds.add(kind)
            assert refuses(llm, plan), f"{kind}: {plan!r} was taken"
        if nth % 40 == 0:
            after = ask(llm, good)
            assert generated(after) == generated(expected)
            assert after.receipt.to_dict() | {"request_id": ""} == (
                expected.receipt.to_dict() | {"request_id": ""}
            )
            for tap, rows in expected.activations.items():
                torch.testing.assert_close(after.activations[tap], rows)
    assert len(kinds) > 20
    assert not llm.llm_engine.has_unfinished_requests()
    inspect(llm).check_integrity()


def test_a_forged_plan_that_looks_checked_fails_alone(llm):
    # Bytes that no front door made, under the right form: the worker refuses them by itself.
    engine = llm.llm_engine
    expected = generated(llm.generate(tokens(PROMPT), greedy(6), use_tqdm=False)[0])
    forged = engine.input_processor.process_inputs(
        "forged", tokens(PROMPT), greedy(6), ("generate",)
    )
    forged.sampling_params.extra_args = {"midstream": ["uid", b"MSP2 junk", [[0], ["k"], None]]}
    core = engine.engine_core.engine_core
    core.add_request(*core.preprocess_add_request(forged))
    plain = llm.generate(tokens(PROMPT), greedy(6), use_tqdm=False)[0]
    assert generated(plain) == expected
    while core.scheduler.has_requests():
        core.step()
    assert "forged" not in core.scheduler.requests
    assert ask(llm, {"capture": {"layers": 0}}).receipt.status == "ok"
    engine.collective_rpc("midstream_rpc", args=arguments_of(ReleaseRequests(["uid"])))
    engine.collective_rpc("midstream_rpc", args=arguments_of(CheckIntegrity()))
