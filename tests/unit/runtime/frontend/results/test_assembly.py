"""From what the workers sent to activations and receipts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.answers import (
    DEEP,
    POST,
    PRE,
    WIDTH,
    answer,
    assemble_on,
    assembled,
    output,
    rows,
    vector,
)
from support.fake_steps import MIXED, Fake, FakeEngine
from support.plans import VECTORS, plan_of
from support.stored import put_one, worker_info

from midstream.codecs import Full8
from midstream.errors import ReceiptError
from midstream.plan import ModelShape, Where
from midstream.results.serialization import pack, unpack
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.results.assembly import assemble
from midstream.runtime.frontend.rpc.remote_worker import RemoteWorker
from midstream.runtime.protocol.results import WorkerAnswer
from midstream.runtime.protocol.segments import NONFINITE
from midstream.runtime.worker import result_buffer
from midstream.runtime.worker.result_buffer import ResultBuffer

EVERYWHERE = ((0, None),)
READ = plan_of(captures=[([PRE, POST], EVERYWHERE)], prompt_len=3)
STEER = plan_of(edits=[(POST, VECTORS[0], 2.0, ((1, None),))], prompt_len=3)


# ---------------------------------------------------------------- rows


def test_a_request_gets_its_rows_by_tap_with_positions_and_tokens():
    found = assembled(READ, [answer(("x", [2] * 4, [rows([PRE, POST], range(4))]))])
    assert list(found.activations) == [PRE, POST]
    for tap in (PRE, POST):
        assert found.activations[tap].tolist() == [vector(tap, p) for p in range(4)]
    assert found.activations.positions.tolist() == [0, 1, 2, 3]
    assert found.activations.token_ids.tolist() == [100, 101, 102, 200]
    assert found.receipt.status == "ok"
    assert [(c.site, c.layer, c.expected, c.actual) for c in found.receipt.captured] == [
        ("resid_pre", 0, 4, 4),
        ("resid_post", 1, 4, 4),
    ]
    assert found.receipt.edited is None
    assert (found.receipt.prompt_tokens, found.receipt.generated_tokens) == (3, 2)
    assert found.activations is found.outputs[0].activations
    assert found.receipt is found.outputs[0].receipt


def test_pipeline_stages_each_give_their_own_layers():
    plan = plan_of(
        edits=[(PRE, VECTORS[0], 1.0, EVERYWHERE), (DEEP, VECTORS[1], 1.0, ((2, None),))],
        captures=[([PRE, DEEP], EVERYWHERE)],
        prompt_len=3,
    )
    answers = [
        answer(("x", [3] * 4, [rows([PRE], range(4))]), stage=0),
        answer(("x", [2, 2, 3, 3], [rows([DEEP], range(4))]), stage=1),
    ]
    found = assembled(plan, answers)
    assert found.activations[PRE].tolist() == [vector(PRE, p) for p in range(4)]
    assert found.activations[DEEP].tolist() == [vector(DEEP, p) for p in range(4)]
    assert found.receipt.status == "ok"
    assert found.receipt.edited.applied == 6


def test_rows_past_the_final_length_are_dropped():
    # Asynchronous scheduling computes a step more than the request turns out to have.
    both = plan_of(
        edits=[(POST, VECTORS[0], 2.0, EVERYWHERE)], captures=[([POST], EVERYWHERE)], prompt_len=3
    )
    found = assembled(both, [answer(("x", [3] * 6, [rows([POST], range(6))]))])
    assert found.activations.positions.tolist() == [0, 1, 2, 3]
    assert found.receipt.edited.applied == 4
    assert found.receipt.status == "ok"


def test_of_a_capture_of_the_last_row_only_that_row_is_kept():
    plan = plan_of(captures=[([POST], Where(((0, 1),), last_from=3))], prompt_len=3)
    answers = [
        answer(("x", [2, 0, 0, 2, 2], [rows([POST], [0]), rows([POST], [3]), rows([POST], [4])]))
    ]
    found = assembled(plan, answers, generated=3)
    assert found.activations.positions.tolist() == [0, 4]
    assert found.activations[POST].tolist() == [vector(POST, 0), vector(POST, 4)]
    assert found.receipt.status == "ok"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_keep_the_models_dtype_and_may_be_written_to(dtype):
    torch_dtype = getattr(torch, dtype)
    found = assembled(
        READ,
        [answer(("x", [2] * 4, [rows([PRE, POST], range(4), dtype=torch_dtype)]), dtype=dtype)],
        dtype,
    )
    assert found.activations[POST].dtype == torch_dtype
    found.activations[POST][0] = 9
    assert found.activations[POST][0].tolist() == [9.0] * 4
    assert found.activations[PRE][0].tolist() == vector(PRE, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_capture_without_any_row_is_empty_but_of_the_models_shape_and_dtype(dtype, tmp_path):
    # "generated", of a request that stopped at its first token.
    plan = plan_of(captures=[([PRE, POST], ((3, None),))], prompt_len=3)
    found = assembled(plan, [answer(("x", [0] * 3, []), dtype=dtype)], dtype, generated=1)
    assert found.receipt.status == "ok"
    assert found.activations[POST].shape == (0, WIDTH)
    assert found.activations[POST].dtype == getattr(torch, dtype)
    assert found.activations.positions.tolist() == []
    assert found.activations.positions.dtype == torch.int64
    assert found.activations.save(tmp_path / "empty.safetensors").exists()


def test_a_prompt_of_embeddings_has_positions_all_the_same():
    found = output()
    found.prompt_token_ids = None
    assemble_on(found, READ, [answer(("x", [2] * 4, [rows([PRE, POST], range(4))]))], "float32")
    assert found.activations.positions.tolist() == [0, 1, 2, 3]
    assert found.activations.token_ids.tolist() == [0, 0, 0, 200]
    assert found.receipt.status == "ok"


# ---------------------------------------------------------------- several completions


def child(n):
    return (f"{n}_x", [2] * 4, [rows([PRE, POST], range(4), version=n)])


def test_children_are_told_apart_by_their_exact_index_in_any_order():
    order = [10, 1, 0, 11, 2, 9, 3, 8, 4, 7, 5, 6]
    found = assembled(READ, [answer(*(child(n) for n in order))], completions=12)
    for n, completion in enumerate(found.outputs):
        assert completion.activations[POST].tolist() == [vector(POST, p, n) for p in range(4)]
        assert completion.activations.token_ids.tolist() == [100, 101, 102, 200 + 10 * n]
        assert completion.receipt.status == "ok"
    assert not hasattr(found, "activations")
    assert not hasattr(found, "receipt")
    lost = assembled(READ, [answer(*(child(n) for n in order if n != 1))], completions=12)
    problems = [completion.receipt.problems for completion in lost.outputs]
    assert [bool(problem) for problem in problems] == [n == 1 for n in range(12)]
    assert "the workers know nothing of it" in problems[1][0]


# ---------------------------------------------------------------- receipts


def test_tensor_parallel_ranks_do_the_same_and_are_counted_once():
    answers = [
        answer(("x", [0, 3, 3, 3], []), tensor_rank=rank, tensor_ranks=2) for rank in range(2)
    ]
    receipt = assembled(STEER, answers).receipt
    assert receipt.edited.applied == 3
    assert not receipt.problems


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (
            [("x", [0, 3, 2, 2], [])],
            "2 positions were not edited alike on workers 0.0.0 and 0.0.1; the first is 2",
        ),
        ([], "worker 0.0.1 knows nothing of it"),
    ],
)
def test_a_rank_that_did_other_edits_than_the_first_is_a_problem(second, problem):
    answers = [
        answer(("x", [0, 3, 3, 3], []), tensor_rank=0, tensor_ranks=2),
        answer(*second, tensor_rank=1, tensor_ranks=2),
    ]
    assert assembled(STEER, answers).receipt.problems == (problem,)


def test_rows_that_ranks_share_otherwise_from_one_position_to_the_next_come_in_order():
    captures = [([PRE], ((0, 2),)), ([PRE, POST], ((2, None),))]
    plan = replace(plan_of(captures=captures, prompt_len=3), sharded=True)
    answers = [
        answer(("x", [2] * 4, [rows([PRE], range(2)), rows([PRE], range(2, 4))]), tensor_ranks=2),
        answer(("x", [2] * 4, [rows([POST], range(2, 4))]), tensor_rank=1, tensor_ranks=2),
    ]
    found = assembled(plan, answers)
    assert not found.receipt.problems
    assert found.activations[PRE].tolist() == [vector(PRE, p) for p in range(4)]
    assert found.activations[POST].tolist() == [vector(POST, p) for p in range(2, 4)]


@pytest.mark.parametrize(
    ("done", "wrong", "first", "edits", "expected"),
    [
        ([0, 3, 2, 3], 1, 2, 0, 1),
        ([0, 4, 3, 3], 1, 1, 2, 1),
        ([3, 3, 3, 3], 1, 0, 1, 0),
        ([0, 3], 2, 2, 0, 1),
        ([], 3, 1, 0, 1),
    ],
)
def test_a_wrong_number_of_edits_is_found_by_position(done, wrong, first, edits, expected):
    receipt = assembled(STEER, [answer(("x", done, []))]).receipt
    assert receipt.problems == (
        f"{wrong} positions were not edited as asked: position {first} got {edits} edits and "
        f"probes, expected {expected}",
    )
    with pytest.raises(ReceiptError, match="request x: .* positions were not edited as asked"):
        receipt.check()


@pytest.mark.parametrize("state", [0, 1], ids=["left out", "from the cache"])
def test_an_edit_left_out_on_one_stage_only_is_a_problem(state):
    plan = plan_of(
        edits=[(PRE, VECTORS[0], 1.0, EVERYWHERE), (DEEP, VECTORS[1], 1.0, EVERYWHERE)],
        prompt_len=3,
    )
    answers = [
        answer(("x", [state, 3, 3, 3], []), stage=0),
        answer(("x", [3, 3, 3, 3], []), stage=1),
    ]
    assert assembled(plan, answers).receipt.problems == (
        "1 positions were not edited as asked: position 0 got 1 edits and probes, expected 2",
    )


@pytest.mark.parametrize(
    ("positions", "actual"), [(range(3), 3), (range(1, 4), 3), ([1], 1), (None, 0)]
)
def test_a_missing_row_is_found_by_tap(positions, actual):
    found = [rows([PRE], range(4))]
    if positions is not None:
        found.append(rows([POST], positions))
    receipt = assembled(READ, [answer(("x", [2] * 4, found))]).receipt
    assert receipt.problems == (f"resid_post of layer 1: {actual} rows came, expected 4",)
    assert [one.actual for one in receipt.captured] == [4, actual]


def test_a_workers_own_problem_is_told_with_the_workers_place():
    answers = [
        answer(("x", [2] * 4, [rows([PRE, POST], range(4))]), stage=0),
        answer(("x", [], [], "no tap fired"), stage=1),
    ]
    assert assembled(READ, answers).receipt.problems == ("no tap fired (worker 0.1.0)",)


def test_what_requests_of_one_plan_share_is_only_what_the_workers_said_alike():
    both = [rows([PRE, POST], range(4))]
    sent = {
        "ok": ("x", [2] * 4, both),
        "a row is missing": ("x", [2] * 4, [rows([PRE], range(4)), rows([POST], range(3))]),
        "a problem": ("x", [2] * 4, both, "no tap fired"),
        "not finite": ("x", [2, 2, NONFINITE | 2, 2], both),
    }
    alone = {}
    for what, each in sent.items():
        fresh = plan_of(captures=[([PRE, POST], EVERYWHERE)], prompt_len=3)
        alone[what] = assembled(fresh, [answer(each)]).receipt
    assert len(set(alone.values())) == len(sent)
    shared = plan_of(captures=[([PRE, POST], EVERYWHERE)], prompt_len=3)
    for what in ("ok", "a problem", "ok", "not finite", "a row is missing", "ok", "a problem"):
        assert assembled(shared, [answer(sent[what])]).receipt == alone[what], what
    for weights in ([1, 2], [2], []):
        found = assembled(shared, [answer(sent["ok"], weights=weights)]).receipt
        assert [version.number for version in found.weight_versions] == weights
    failed = output()
    failed.outputs[0].finish_reason = "error"
    assemble_on(failed, shared, [answer(sent["ok"])])
    assert failed.receipt.status == "error"


def test_positions_of_a_request_can_be_changed_without_changing_those_of_the_next():
    sent = ("x", [2] * 4, [rows([PRE, POST], range(4))])
    for _ in range(3):
        found = assembled(READ, [answer(sent)])
        assert found.activations.positions.tolist() == [0, 1, 2, 3]
        found.activations.positions.zero_()
        found.activations[POST].zero_()
    assert assembled(READ, [answer(sent)]).activations[POST][3].tolist() == vector(POST, 3)


def test_rows_are_packed_as_they_are_whether_or_not_they_were_read():
    sent = ("x", [2] * 4, [rows([PRE, POST], range(4))])
    unread, read = (assembled(READ, [answer(sent)]).activations for _ in range(2))
    assert read[POST][3].tolist() == vector(POST, 3)
    packed = pack(unread, WIDTH, torch.float32)
    assert packed == pack(read, WIDTH, torch.float32)
    for rows_ in (unread, read):
        rows_[POST][0] = 9
        assert unpack(pack(rows_, WIDTH, torch.float32))[POST][0].tolist() == [9.0] * 4
    assert unpack(packed)[POST][0].tolist() == vector(POST, 0)


# ---------------------------------------------------------------- what was not computed


def test_edits_of_positions_from_the_cache_are_counted_apart():
    # 3 of the prompt and 2 generated: 4 rows, edited from position 1 on.
    receipt = assembled(STEER, [answer(("x", [1, 1, 3, 3], []))]).receipt
    assert receipt.status == "ok"
    edited = receipt.edited
    assert (edited.expected, edited.applied, edited.cached, edited.tokens) == (3, 2, 1, 3)
    assert "2 of 3 edits, 1 from the prefix cache" in str(receipt)


def test_a_request_that_the_engine_ended_says_why():
    plain = output(3, 2)
    plain.outputs[0].finish_reason = "error"
    plain.outputs[0].stop_reason = "it was served wrong KV"
    assemble_on(plain, STEER, [answer(("x", [2, 3, 3, 3], []))], "float32")
    assert plain.receipt.problems == ("it was served wrong KV",)


@pytest.mark.parametrize("codec", ["raw", "full8"])
@pytest.mark.parametrize("leased", [False, True])
def test_rows_of_different_widths_are_those_of_their_taps(codec, leased, monkeypatch):
    monkeypatch.setattr(result_buffer, "LEASED_BYTES", 0)
    taps = list(MIXED)
    plan = plan_of(captures=[(taps, ((0, 6),)), (taps[1:3], ((6, None),))], prompt_len=8)
    plan = replace(plan, codec=codec)
    engine = FakeEngine(mixed=True, bank_rows=256, ring_rows=64 * 12)
    fake = Fake("x", plan)
    engine.add(fake)
    for count in (5, 3, 1):
        engine.step([(fake, count)])
    shape = ModelShape(3, WIDTH, taps, widths=MIXED)
    info = worker_info(
        taps=tuple(taps), widths=tuple(MIXED.values()), arena=engine.arena.leases.address
    )
    worker, buffer = RemoteWorker(info), ResultBuffer(engine.arena, engine.session.encoding)
    header = put_one(buffer, "u", engine.take("x"), mapped=leased)
    assert (header.lease is not None) == leased
    worker.see([header], [])
    (data,) = buffer.inline(["u"])
    lease = worker.leased(header.lease) if leased else None
    answers = [WorkerAnswer(info, header, data or b"", lease)]
    found = assemble(output(prompt=8, generated=2), AdmittedRequest("u", plan), answers, shape)[0]
    assert found.receipt.status == "ok"
    assert {tap: len(found.activations.positions_of(*tap)) for tap in taps} == {
        tap: 9 if tap in taps[1:3] else 6 for tap in taps
    }
    for tap in taps:
        wanted = [fake.rows[tap, p] for p in found.activations.positions_of(*tap).tolist()]
        rows = torch.tensor(np.array(wanted))
        if codec == "full8":
            rows = Full8().decode(Full8().encode(rows), MIXED[tap], torch.float32)
        assert torch.equal(found.activations[tap], rows)
