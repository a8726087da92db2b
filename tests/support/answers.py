"""Workers' answers for a finished request, and the front end's results from them."""

from types import MappingProxyType, SimpleNamespace

import numpy as np
import torch

from midstream.codecs import Raw, RowEncoding
from midstream.plan import ModelShape
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.results.assembly import assemble
from midstream.runtime.protocol.results import WeightState, WorkerAnswer
from midstream.runtime.worker.request_state import RequestState
from midstream.runtime.worker.result_buffer import ResultBuffer
from midstream.runtime.worker.row_index import CapturedRowIndex
from support.plans import plan_of
from support.stored import make_arena, put_one, score_rows, stored, worker_info

PRE, POST, DEEP = ("resid_pre", 0), ("resid_post", 1), ("resid_post", 7)
EVERYWHERE = ((0, None),)
WIDTH = 4


def output(prompt=3, generated=2, completions=1, request_id="x"):
    """A finished RequestOutput: tokens 100, 101, … of the prompt, then 200, 201, …"""
    return SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=list(range(100, 100 + prompt)),
        outputs=[
            SimpleNamespace(
                index=n,
                token_ids=[200 + 10 * n + g for g in range(generated)],
                finish_reason="length",
                stop_reason=None,
            )
            for n in range(completions)
        ],
    )


def vector(tap, position, version=0):
    return [float(tap[1]), float(position), float(version), float(len(tap[0]))]


def rows(taps, positions, version=0, dtype=torch.float32):
    """What one step captured: (taps, first position, a shipment with a run of rows)."""
    values = torch.tensor([vector(tap, p, version) for p in positions for tap in taps])
    return taps, list(positions)[0], stored(values.to(dtype))


def answer(
    *requests,
    stage=0,
    tensor_rank=0,
    tensor_ranks=1,
    taps=(),
    scores=(),
    dtype="float32",
    weights=(),
):
    """One worker's answer for (id, done, [rows(…)], problem?), through its row index and outbox.

    Args:
        taps: more taps than those of the rows.
        weights: numbers of the weights that every request ran on.
        scores: (first position, [[score of each slot], …]) of every request.
    """
    found = [tap for _, _, found, *_ in requests for own, *_ in found for tap in own]
    names = list(dict.fromkeys([*found, *taps]))
    slots = max((len(row) for _, table in scores for row in table), default=1)
    plan = plan_of(probes=[(f"p{slot}", PRE, EVERYWHERE) for slot in range(slots)])
    ledger, kept = CapturedRowIndex(), []
    for serial, (name, done, found, *problem) in enumerate(requests):
        request = RequestState(name, "u", plan, 0, [])
        request.done = np.array(done, np.uint16)
        request.problem = problem[0] if problem else ""
        request.weights = [WeightState(number) for number in weights]
        for taps, first, shipment in found:
            length = len(shipment.rows()) // len(taps)
            kind = ledger.kind(tuple(map(names.index, taps)))
            ledger.record(shipment, *(np.array([n]) for n in (serial, first, length, 0, kind)))
        request.blocks = ledger.take([serial])[serial]
        request.scores = [
            score_rows(range(first, first + len(table)), torch.tensor(table))
            for first, table in scores
        ]
        kept.append(request)
    outbox = ResultBuffer(make_arena(), lambda _: RowEncoding.of(Raw(), (), WIDTH))
    header = put_one(outbox, "u", kept, mapped=False)
    worker = worker_info(
        stage=stage,
        tensor_rank=tensor_rank,
        tensor_ranks=tensor_ranks,
        hidden_size=WIDTH,
        dtype=dtype,
        taps=tuple(names),
    )
    return WorkerAnswer(worker, header, outbox.read("u", 0, 10**9))


def assembled(plan, answers, dtype="float32", **shape):
    found = output(**shape)
    assemble_on(found, plan, answers, dtype)
    return found


def shape_of(dtype="float32") -> ModelShape:
    """Return the shape of the model whose workers give the answers here."""
    return ModelShape(2, WIDTH, (), dtype=dtype)


def assemble_on(output, plan, answers, dtype="float32", before=MappingProxyType({})):
    """Set assembled results on an output, as when all rows are for `memory`; return them."""
    results = assemble(output, AdmittedRequest("u", plan), answers, shape_of(dtype), before)
    for completion in output.outputs:
        mine = results[completion.index]
        completion.activations, completion.probes = mine.activations, mine.probes
        completion.receipt = mine.receipt
    if len(output.outputs) == 1:
        (only,) = output.outputs
        output.activations, output.probes = only.activations, only.probes
        output.receipt = only.receipt
    return results
