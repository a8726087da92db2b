"""The same requests with and without speculative decoding; engines in separate processes.

    python -m support.speculation MODEL OUT KIND [SETTINGS]

KIND is `alone` (each request by itself, nothing drafted), `ngram`, `draft` or `eagle`. SETTINGS are
the engine's, in JSON, and `drafter` (a model), `truth` (results that scripted drafts are taken
from), `streamed` (on an async engine). What came of it is saved to OUT: per way of drafting the
cases' results, and how many drafted tokens were accepted and rejected.
"""

import asyncio
import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple

import torch

from support.async_calls import ask
from support.async_run import ARGUMENTS
from support.engine_view import inspect
from support.engines import engine, greedy, tokens
from support.nightly import NIGHTLY
from support.output_results import logprobs, results
from support.own_process import python
from support.scripted import Script, optimistic

SITES = ["resid_pre", "resid_mid", "resid_post"]
DRAFTS = 3
MAX_LEN = 64
COMMON = {
    "max_model_len": MAX_LEN,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 16,
    # What is computed, not what is cached, is at stake here.
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "midstream": {
        "sites": [*SITES, "rot_q", "final_norm", "logits"],
        "gate_states": 8,
        "reductions": 512,
    },
}
SPECULATION: dict[str, dict[str, Any]] = {
    "alone": {},
    "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "draft": {"method": "draft_model"},
    "eagle": {"method": "eagle"},
}
# A bias of an amount that leaves other tokens likely as well.
FAVOURED = {token: 2.0 + token % 5 / 2 for token in range(3, 120, 7)}
# (name, how many drafts are right, None: random; whether the host learns of it a step later)
SCRIPTS = [
    ("some right, told late", None, True),
]
if NIGHTLY:
    SCRIPTS += [
        ("some right", None, False),
        ("all right", DRAFTS, False),
        ("all wrong", 0, False),
        ("all wrong, told late", 0, True),
        ("all right, told late", DRAFTS, True),
    ]


class Case(NamedTuple):
    """One request: its prompt, SamplingParams, and what is asked of midstream."""

    name: str
    prompt: list[int]
    sampling: dict[str, Any]
    asked: dict[str, Any]


def cases(width: int, layers: int, vocabulary: int) -> list[Case]:
    """Every kind of selection and operation, at prompts that repeat themselves."""
    from midstream import (
        Ablate,
        Attention,
        Between,
        Bias,
        Capture,
        Gate,
        Logits,
        Probe,
        Replace,
        Scale,
        Steer,
        TokenIds,
    )
    from midstream.plan import Mass, Reading

    def vector(seed: int) -> torch.Tensor:
        return torch.randn(width, generator=torch.Generator().manual_seed(seed))

    size, last = 13, layers - 1
    even = TokenIds(list(range(0, min(vocabulary, 8000), 2)))
    bounded = {"positions": slice(size + 2, size + 9)}
    everything = Capture("all", SITES)
    gate = Gate(
        Steer(vector(4), last, 3.0, positions="generated"), {"direction": vector(5), "layer": 0}
    )
    opened = Reading(vector(5), site="final_norm")
    rows = torch.stack([vector(10 + n) for n in range(7)])
    asked: dict[str, dict[str, Any]] = {
        "everything": {"capture": everything},
        "generated": {"capture": Capture("all", SITES, positions="generated")},
        "last_row": {
            "capture": Capture("all", positions="last_row"),
            "probes": _last(vector(1), last),
        },
        "bounded": {"capture": Capture([0, last], SITES, **bounded)},
        "ids": {"capture": Capture(last, positions=even, phase="generated")},
        "steered": {"edits": [Steer(vector(2), 1, 1.5)], "capture": everything},
        "steered generated": {
            "edits": [Steer(vector(2), 1, 1.5, positions="generated")],
            "capture": everything,
        },
        "steered bounded": {
            "edits": [Steer(vector(3), 0, 2.0, **bounded), Ablate(vector(6), 1, **bounded)],
            "capture": everything,
        },
        "steered by ids": {
            "edits": [Steer(vector(3), 1, 2.0, positions=even, phase="generated")],
            "capture": everything,
        },
        "replaced": {"edits": [Replace(rows, 1, **bounded)], "capture": everything},
        "gated": {"edits": [gate, Scale(0.5, 0, **bounded)], "capture": everything},
        "gated for some": {
            "edits": [
                Gate(Steer(vector(4), 1, 3.0), vector(5), threshold=4.0, hold=2, smooth=0.6),
                Gate(
                    Steer(vector(6), last, 2.0, positions=even, phase="generated"),
                    Reading(vector(7), layer=0),
                    threshold=1.0,
                    release=-2.0,
                ),
            ],
            "capture": everything,
        },
        "gated for good": {
            "edits": [
                Gate(
                    Steer(vector(8), 1, 3.0, positions="generated"),
                    Reading(vector(9), layer=0, site="resid_mid"),
                    threshold=8.0,
                    hold="rest",
                )
            ],
            "capture": everything,
        },
        "probed": {
            "probes": [
                Probe(vector(7), last, name="a"),
                Probe(vector(8), 0, name="b", positions="generated"),
                Probe(vector(8), 1, name="c", **bounded),
                Probe(vector(8), 1, name="d", positions=even, phase="generated"),
            ]
        },
        "plain": {},
        "one token": {"capture": everything},
        "stopped": {"capture": everything, "edits": [Steer(vector(2), 1, positions="generated")]},
        "to the end": {"capture": everything, "edits": [Steer(vector(9), 1, positions="prompt")]},
        "attended": {"capture": Attention("all", reduce="full")},
        "attended generated": {
            "capture": Attention("all", 1, "generated", reduce=Mass(slice(4, 18))),
            "probes": Probe(attention=Mass(slice(4, 18)), layer=last, name="mass"),
            "edits": [Steer(vector(9), 1, positions="prompt")],
        },
        "biased": {"edits": [Bias(FAVOURED)]},
        "biased generated": {
            "edits": [Bias({11: 60.0}), Bias({13: 90.0}, TokenIds([11]), phase="generated")],
        },
        "biased bounded": {
            "edits": [Bias({9: 50.0}, **bounded), Gate(Bias(FAVOURED), opened, threshold=0.0)],
            "capture": Logits(tokens=[9, 3, 60]),
        },
        "logits": {"capture": Logits(5, positions=["last_prompt", "generated"])},
        "reduced": {"capture": Capture("all", SITES, positions="prompt", reduce="moments")},
        "norms": {"capture": Capture("all", SITES, reduce="norm")},
        "between marks": {
            # What is generated is 11, 13, 17, 11, …
            "edits": [
                Bias({11: 60.0}),
                Bias({13: 120.0}, TokenIds([11]), phase="generated"),
                Bias({17: 120.0}, TokenIds([13]), phase="generated"),
                Steer(vector(2), 1, 1.5, positions=Between(11, 17)),
                Steer(vector(3), 0, 2.0, positions=Between([7, 8], [17, 11]), exclude=even),
                Steer(vector(4), 1, 1.0, positions=Between([17, 11], None)),
            ],
            "probes": [Probe(vector(8), last, name="e", positions=Between([13], [11]))],
            "capture": Capture("all", SITES, positions=Between([11], [11])),
        },
    }
    sampling: dict[str, dict[str, Any]] = {
        "one token": {"max_tokens": 1},
        "stopped": {"max_tokens": 30, "stop_token_ids": list(range(3, min(vocabulary, 8000), 9))},
        "to the end": {"max_tokens": 200},
        "biased": {"logprobs": 1},
        "biased bounded": {"logprobs": 1},
    }
    return [
        Case(
            name,
            # No two alike, so that it is known whose tokens are to be guessed.
            [20 + nth, *[5, 6, 7, 8] * 3],
            {"max_tokens": 16, **sampling.get(name, {})},
            what,
        )
        for nth, (name, what) in enumerate(asked.items())
    ]


def _last(direction: torch.Tensor, layer: int) -> list[Any]:
    from midstream import Probe

    return [Probe(direction, layer, name="last_row", positions="last_row")]


def of_model(info: Any) -> list[Case]:
    """The cases for an engine's model."""
    return cases(info.shape.hidden_size, info.shape.num_layers, 190)


def alone(llm: Any) -> dict[str, Any]:
    """Each case by itself."""
    return {
        case.name: _result(
            llm.generate(tokens(case.prompt), _params(case), use_tqdm=False, **case.asked)[0]
        )
        for case in of_model(llm.info)
    }


def together(llm: Any) -> dict[str, Any]:
    """All cases in one batch."""
    every = of_model(llm.info)
    asked = {name: [case.asked.get(name) for case in every] for name in ARGUMENTS}
    outputs = llm.generate(
        [tokens(case.prompt) for case in every],
        [_params(case) for case in every],
        use_tqdm=False,
        **{name: given for name, given in asked.items() if any(given)},
    )
    return {case.name: _result(one) for case, one in zip(every, outputs, strict=True)}


def in_pieces(llm: Any) -> dict[str, Any]:
    """All cases in one batch once more, all rows of each in memory and in a sink that gets them as
    they come: per case how many pieces, the receipt's status, whether both are alike, and per tap
    what the sink has: rows, positions.
    """
    from midstream import Capture

    every = of_model(llm.info)
    outputs = llm.generate(
        [tokens(case.prompt) for case in every],
        [_params(case) for case in every],
        use_tqdm=False,
        edits=[case.asked.get("edits") for case in every],
        capture=[[Capture("all", SITES, sink=sink) for sink in ("memory", "rows")]] * len(every),
    )
    sink = inspect(llm).sink("rows")
    found = {}
    for case, output in zip(every, outputs, strict=True):
        put_together, pieces = sink.whole(output.request_id)
        memory = output.activations
        alike = [
            torch.equal(encoded, memory.encoded(*tap))
            and torch.equal(positions, memory.positions_of(*tap))
            and torch.equal(ids, memory.token_ids_of(*tap))
            for tap, (encoded, positions, ids) in put_together.items()
        ]
        rows = {
            tap: (encoded.contiguous().view(torch.float32), positions)
            for tap, (encoded, positions, _) in put_together.items()
        }
        is_alike = len(alike) > 1 and all(alike)
        found[case.name] = (len(pieces), output.receipt.status, is_alike, rows)
    return found


def _params(case: Case, **more: Any) -> Any:
    return greedy(**case.sampling, detokenize=False, **more)


def _result(output: Any) -> dict[str, Any]:
    return {
        "prompt": list(output.prompt_token_ids),
        "generated": list(output.outputs[0].token_ids),
        **results(output),
        **logprobs(output),
    }


def counted(before: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Drafted tokens that were (accepted, rejected) in this process's engine."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    found = {one.name: getattr(one, "value", 0) for one in get_metrics_snapshot()}
    accepted = int(found.get("vllm:spec_decode_num_accepted_tokens", 0))
    drafted = int(found.get("vllm:spec_decode_num_draft_tokens", 0))
    return accepted - before[0], drafted - accepted - before[1]


def offline(model: Path, kind: str, settings: dict[str, Any], truth: Any) -> dict[str, Any]:
    """All cases with n-grams, then with scripted drafts where the truth is known."""
    from midstream.runtime.frontend.results import row_streamer
    from midstream.sinks import registry as finding

    found: dict[str, Any] = {}
    row_streamer.CHECK_SECONDS = 0.0
    entry = EntryPoint("rows", "support.sinking:AsTheyCome", finding.GROUP)
    finding.entry_points = lambda group: [entry]  # type: ignore[assignment]
    settings["midstream"] = {**settings["midstream"], "sinks": "rows"}
    with engine(model, **settings) as llm:
        if kind == "alone":
            return {"alone": alone(llm)}
        scheduler = llm.llm_engine.vllm_config.scheduler_config
        found["async"] = bool(scheduler.async_scheduling)
        found["runner"] = llm.info.workers[0].runner
        before = counted()
        found[kind] = {"results": together(llm), "drafts": counted(before)}
        for name, right, late in SCRIPTS if truth else ():
            before = counted()
            with Script(llm, list(truth.values()), right), optimistic(late) as steps:
                found[name] = {"results": together(llm), "drafts": counted(before)}
                found[name]["pieces"] = in_pieces(llm)
            found[name]["late steps"] = steps[0]
        inspect(llm).check_integrity()
    return found


async def streamed(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """All cases at once on an async engine that shows scores as they come."""
    from vllm import AsyncEngineArgs

    from midstream import AsyncLLM

    own = {"dtype": "float32", "enforce_eager": True, "seed": 0, "num_gpu_blocks_override": 64}
    own |= settings
    own["additional_config"] = {"midstream": own.pop("midstream")}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **own))
    try:
        await llm.ready()
        every = of_model(llm.info)
        found = await asyncio.gather(
            *(ask(llm, c.name, tokens(c.prompt), _params(c), **c.asked) for c in every)
        )
        await inspect(llm).check_integrity()
        return {
            "async": bool(llm.vllm_config.scheduler_config.async_scheduling),
            "runner": llm.info.workers[0].runner,
            "draft": {
                "results": {
                    case.name: {"prompt": case.prompt, **one}
                    for case, one in zip(every, found, strict=True)
                },
                "drafts": counted(),
            },
        }
    finally:
        llm.shutdown()


def run(model: Path, out: Path, kind: str, settings: dict[str, Any], **env: str) -> dict[str, Any]:
    """One engine in a process of its own (n-grams bring numba, after which no second engine of the
    same process runs); what came of it.
    """
    python("-m", "support.speculation", model, out, kind, json.dumps(settings), timeout=540, **env)
    found: dict[str, Any] = torch.load(out)
    return found


def main() -> None:
    model, out, kind = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    given = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    settings = {**COMMON, **given}
    settings.setdefault("skip_tokenizer_init", not (Path(model) / "tokenizer.json").exists())
    if kind != "alone":
        drafter = {} if kind == "ngram" else {"model": settings.pop("drafter", model)}
        settings["speculative_config"] = {
            "num_speculative_tokens": DRAFTS,
            **SPECULATION[kind],
            **drafter,
        }
    truth = settings.pop("truth", None)
    if settings.pop("streamed", False):
        found = asyncio.run(streamed(model, settings))
    else:
        found = offline(Path(model), kind, settings, torch.load(truth) if truth else None)
    torch.save(found, out)


if __name__ == "__main__":
    main()
