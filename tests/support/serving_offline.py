"""The offline engine's results for the requests that tests send to a server.

`python -m support.serving_offline MODEL OUT` writes it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from midstream import Ablate, Between, Capture, Client, Gate, LogitDiff, Probe, Reading, Steer
from midstream.client import ServedOutput
from support.serving import ENGINE, NAME

TOKENS = 6
VECTOR = torch.randn(576, generator=torch.Generator().manual_seed(0))
HELLO = [{"role": "user", "content": "Say hello."}]

ASKED = {"model": NAME, "temperature": 0, "max_tokens": TOKENS}


@dataclass(frozen=True, slots=True)
class Case:
    """One request: a prompt or a conversation, and what it asks for, as arguments by name."""

    prompt: str | list[dict[str, str]]
    asked: dict[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return isinstance(self.prompt, list)


CASES = {
    "plain": Case("The capital of France is"),
    "plain chat": Case(HELLO),
    "everything": Case(
        "The capital of France is",
        {
            "capture": Capture([10, 20]),
            "probes": [Probe(VECTOR, 5, name="p"), Probe(VECTOR, 7, name="q", phase="generated")],
            "steer": Steer(VECTOR, 3, 0.1),
        },
    ),
    "edits": Case(
        "One, two, three,", {"edits": Ablate(VECTOR, layer=12), "capture": Capture([12, 29])}
    ),
    "remembered": Case(
        "One, two, three,",
        {
            "edits": Gate(Steer(VECTOR, 12, 0.2), Reading(VECTOR, layer=5), hold=2, smooth=0.5),
            "capture": Capture([12]),
        },
    ),
    "reduced": Case("Water boils at", {"capture": Capture([4], codec="full8")}),
    "last": Case("Water boils at", {"capture": Capture("all", positions="last_prompt")}),
    "chat": Case(
        HELLO, {"capture": Capture([15]), "probes": Probe(VECTOR, 9, name="p", phase="prompt")}
    ),
    # The answer is "Hello there, welcome to my": the marks are its "Hello" and its "welcome".
    "between": Case(
        HELLO,
        {
            "capture": Capture([15], positions=Between("<|im_start|>", "<|im_end|>")),
            "probes": Probe(VECTOR, 9, name="p", positions=Between([19556], [10668])),
            "edits": Steer(VECTOR, 3, 1e-3, positions=Between([19556], [10668])),
        },
    ),
}

# A sweep, as arguments of `sweep`.
SWEEP: dict[str, Any] = {
    "prompt": "The capital of Japan is",
    "source": "The capital of France is",
    "metric": LogitDiff(" Paris", " Tokyo"),
    "layers": [3, 12, 25],
    "sites": "resid_post",
    "positions": "prompt",
}


def ask(client: Client, case: Case, **more: Any) -> ServedOutput:
    """What a server answers to a case."""
    given = {**ASKED, **case.asked, **more}
    if case.is_chat:
        return client.chat(case.prompt, **given)
    return client.complete(case.prompt, **given)


def plain(completion: Any) -> dict[str, Any]:
    """What came of a completion, be it offline or served, as values that can be compared."""
    rows, probes, receipt = completion.activations, completion.probes, completion.receipt
    told = None if receipt is None else receipt.to_dict()
    if told is not None:
        del told["request_id"]
    return {
        "text": completion.text,
        "receipt": told,
        "rows": None
        if rows is None
        else {
            tap: (rows.encoded(*tap), rows.positions_of(*tap), rows.token_ids_of(*tap))
            for tap in rows
        },
        "codec": None if rows is None else rows.codec.spec,
        "probes": None
        if probes is None
        else {
            name: (probes[name], probes.positions_of(name), probes.token_ids_of(name))
            for name in probes
        },
    }


def assert_equal(mine: dict[str, Any], theirs: dict[str, Any], tolerance: float = 0.0) -> None:
    """Check texts, receipts, rows and scores: bit by bit, or each tensor to a part of its norm."""
    for name in ("text", "receipt", "codec"):
        assert mine[name] == theirs[name]
    for name in ("rows", "probes"):
        assert (mine[name] is None) == (theirs[name] is None), name
        if theirs[name] is not None:
            assert list(mine[name]) == list(theirs[name])
            for key, values in theirs[name].items():
                for ours, other in zip(mine[name][key], values, strict=True):
                    assert ours.dtype == other.dtype
                    assert ours.shape == other.shape
                    # Rows are bytes, of float32 where no codec changed them.
                    mine_, theirs_ = (each.view(torch.float32) for each in (ours, other))
                    off = (mine_ - theirs_).norm() / theirs_.norm()
                    assert torch.equal(ours, other) or off <= tolerance, (name, key, off)


def main(model: str, out: str) -> None:
    from midstream import LLM, SamplingParams

    llm = LLM(model, **ENGINE, midstream={"sites": ["resid_post"], "gate_states": 2})
    params = SamplingParams(max_tokens=TOKENS, temperature=0)
    found = {}
    for name, case in CASES.items():
        ask = llm.chat if case.is_chat else llm.generate
        [output] = ask(case.prompt, params, use_tqdm=False, **case.asked)
        found[name] = plain(output.outputs[0])
    found["sweep"] = llm.sweep(**SWEEP, use_tqdm=False).to_json()
    torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
