"""Host time of captures and edits in each step: the Python around a forward pass, without the pass.

    python benchmarks/step_cost.py [--sequences 256] [--layers 32] [--hidden 4096] [--rounds 5] \
        [--json FILE]

A batch that generates, with a row of every sequence captured (or edited) at each layer; scored by
16 probes, whose scores are kept for the prefix cache; the same, evaluated by the engine core, as of
probes that stop; or idle. Figures are medians over rounds of the median over steps, of the hook
before the forward pass, the hook after it, and the evaluation. `calls` are Python's calls of
midstream's functions in a step: they do not depend on the machine. On a CUDA device the work is
queued as in an engine, and rows are transferred while the next step is prepared. On a CPU the times
include the copy of the rows, so they are also measured with vectors of one number. `captures at a
layer`: every sequence at one layer; `one captures`: one of the sequences at each. Of the time after
a forward pass, `ship_us` is the start of the copies, `settle_us` the verification of earlier steps.

`prompts`: steps of 16 prompts of 512 tokens, all new, with every layer of every token captured. The
time before includes adding the requests, and there is a third: ending them and collecting their
rows.
"""

from __future__ import annotations

import cProfile
import functools
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

import engines

PROMPT, STEPS = 8, 200
PROMPTS, LENGTH, PROMPT_STEPS = 16, 512, 80
PROBES, PROBED = 16, ("probes", "probes that stop")
ONE_LAYER, ONE_CAPTURES = "captures at a layer", "one captures"
CAPTURES = ("captures", ONE_LAYER, ONE_CAPTURES)
BLOCK, BLOCKS = 16, 16  # tokens of a block, and blocks of a sequence


def main() -> int:
    """Measure, and write the table."""
    parser = engines.arguments(__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # threads that wait for each other measure the load of the machine
    run = engines.Run("step_cost", args, sequences=args.sequences, layers=args.layers)
    variants = {
        f"{what}, vectors of {hidden}": functools.partial(
            measure, args.sequences, args.layers, hidden, what, device
        )
        for hidden in (1, args.hidden)
        for what in ("edits", "captures", ONE_LAYER, ONE_CAPTURES)
    }
    variants |= {
        what: functools.partial(measure, args.sequences, args.layers, 64, what, device)
        for what in ("idle", "probes", "probes that stop")
    }
    variants["prompts, vectors of 1"] = functools.partial(measure_prompts, args.layers, device)
    with run.limited():
        run.measure(run.results, "host", variants, medians)
    return run.finish()


def medians(values: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the medians of both hooks over rounds."""
    return {
        name: {key: statistics.median(one[key] for one in each) for key in each[0]}
        for name, each in values.items()
    }


def measure(sequences: int, layers: int, hidden: int, what: str, device: str) -> dict[str, float]:
    """Return the microseconds of the hooks, and the calls of a step."""
    from midstream.plan.resolve.wire import to_bytes
    from midstream.runtime.worker.step.step_batch import StepBatch

    session = make_session(sequences, layers, hidden, device)
    names = [f"r{n}" for n in range(sequences)]
    core = Core(names)
    if what != "idle":
        plan = to_bytes(make_plan(layers, hidden, what))
        for nth, name in enumerate(names[:1] if what == ONE_CAPTURES else names):
            session.requests.add(name, name, plan, 0, what == "probes that stop")
            blocks = [[nth * BLOCKS + number for number in range(BLOCKS)]]
            session.place_scores(name, kept_scores() if what in PROBED else (), blocks, 0)
    scheduled = np.ones(sequences, np.int32)
    seconds: list[tuple[float, ...]] = []
    ship, settle = Timed(session._recorder._transport, "ship"), Timed(session.requests, "settle")  # noqa: SLF001
    profile = cProfile.Profile(builtins=False)
    for step in range(STEPS):
        computed = np.full(sequences, PROMPT + step, np.int32)
        view = StepBatch(names, scheduled, computed, sequences, _no_ids)
        for request in core.requests.values():
            request.num_tokens = PROMPT + step + 1
        if step == STEPS - 1:
            profile.enable()
        start = time.perf_counter()
        session.before_forward(view)
        between = time.perf_counter()
        profile.disable()
        _pretend(session)
        if step == STEPS - 1:
            profile.enable()
        queued = time.perf_counter()
        session.after_forward()
        after = time.perf_counter()
        core.update(session.reported_scores)
        profile.disable()
        parts = ship.take(), settle.take(), time.perf_counter() - after
        seconds.append((between - start, after - queued, *parts))
        if step % 10 == 9 and what in ("edits", *CAPTURES):
            # Fetch rows like a front end, so that they do not accumulate.
            reached = PROMPT + step
            with session.collection.collect_partial({name: {name: reached} for name in names}):
                pass
    calls = sum(row.callcount for row in profile.getstats() if _is_mine(row.code))
    with session.collection.collect(names):
        pass
    parts = "before_us", "after_us", "ship_us", "settle_us", "evaluated_us"
    figures = _medians(seconds[STEPS // 4 :], parts)
    if what != "probes that stop":
        del figures["evaluated_us"]
    return {**figures, "calls": calls}


class Timed:
    """The seconds that a method of an object takes."""

    def __init__(self, of: Any, name: str) -> None:
        self._method, self._seconds = getattr(of, name), 0.0
        setattr(of, name, self)

    def __call__(self, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._method(*args)
        finally:
            self._seconds += time.perf_counter() - start

    def take(self) -> float:
        """Return those since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class Core:
    """What the engine core evaluates of probes that stop."""

    def __init__(self, names: list[str]) -> None:
        from midstream.plan.control.act import Condition
        from midstream.plan.positions.position_set import Where
        from midstream.runtime.protocol.acting_probes import ActingProbe
        from midstream.runtime.protocol.cache_keys import CacheKeys
        from midstream.runtime.protocol.request_payload import RequestPayload

        condition = Condition(above=1e30)
        everywhere = Where(((0, None),))
        acts = [ActingProbe(f"p{n}", n, everywhere, condition) for n in range(PROBES)]
        payload = RequestPayload("u", b"", CacheKeys((0,), ("",), None), acts=tuple(acts))
        self.requests = {
            name: SimpleNamespace(
                request_id=name,
                sampling_params=SimpleNamespace(extra_args={"midstream": payload}),
                is_finished=bool,
            )
            for name in names
        }
        self._places = {name: nth for nth, name in enumerate(names)}
        self._sampled = [[7]] * len(names)

    def update(self, scores: Any) -> None:
        """Evaluate what the worker reports of a step."""
        from midstream.runtime.core.probe_stops import update_from_output

        output = SimpleNamespace(
            midstream_step_scores=scores,
            req_id_to_index=self._places,
            sampled_token_ids=self._sampled,
        )
        update_from_output(lambda *_: {}, self, None, output)


def kept_scores() -> tuple[Any, ...]:
    """Return the scores that the prefix cache keeps of the probes."""
    from midstream.runtime.protocol.cache_keys import KeptScore

    return tuple(KeptScore(f"{n:x}", n, ((0, None),)) for n in range(PROBES))


def _is_mine(code: Any) -> bool:
    return "/midstream/" in getattr(code, "co_filename", "")


def _medians(seconds: list[tuple[float, ...]], names: tuple[str, ...]) -> dict[str, float]:
    columns = zip(*seconds, strict=True)
    return {
        name: 1e6 * statistics.median(column) for name, column in zip(names, columns, strict=True)
    }


def measure_prompts(layers: int, device: str) -> dict[str, float]:
    """Return the microseconds of both hooks and of the collection, for steps of new prompts."""
    from midstream.plan.resolve.wire import to_bytes
    from midstream.runtime.worker.result_buffer import ResultBuffer
    from midstream.runtime.worker.step.step_batch import StepBatch

    tokens = PROMPTS * LENGTH
    session = make_session(tokens, layers, 1, device)
    results = ResultBuffer(session._recorder._arena, session.encoding)  # noqa: SLF001
    plan = to_bytes(make_plan(layers, 1, "captures", LENGTH))
    scheduled, computed = np.full(PROMPTS, LENGTH, np.int32), np.zeros(PROMPTS, np.int32)
    seconds: list[tuple[float, float, float]] = []
    for step in range(PROMPT_STEPS):
        names = [f"{step}-{nth}" for nth in range(PROMPTS)]
        start = time.perf_counter()
        for name in names:
            session.requests.add(name, name, plan)
        session.before_forward(StepBatch(names, scheduled, computed, tokens, _no_ids))
        between = time.perf_counter()
        _pretend(session)
        queued = time.perf_counter()
        session.after_forward()
        after = time.perf_counter()
        session.requests.finish(names)
        with session.collection.collect(names) as taken:
            results.put(taken, mapped=False)
        results.inline(names)
        seconds.append((between - start, after - queued, time.perf_counter() - after))
    return _medians(seconds[PROMPT_STEPS // 4 :], ("before_us", "after_us", "collect_us"))


def make_session(sequences: int, layers: int, hidden: int, device: str) -> Any:
    """Create a worker's session for an engine of that shape."""
    from midstream.runtime.protocol.segments import Room
    from midstream.runtime.vllm.kv_cache import KvBlocks
    from midstream.runtime.worker.session import StepRules, WorkerSession
    from midstream.runtime.worker.step.score_cache import ScoreCache
    from midstream.runtime.worker.step_recorder import RankMemory
    from midstream.runtime.worker.tables.device_buffers import Buffers, BufferSizes
    from midstream.transport.arena import Arena, ArenaSettings
    from midstream.transport.ring_copy import host_transport

    taps = {("resid_post", layer): layer for layer in range(layers)}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    buffers = Buffers.allocate(
        dict.fromkeys(taps, hidden),
        BufferSizes(sequences, hidden, Room(4096, 2048, 65536, 16384, 16), 4 * sequences * layers),
        dtype=dtype,
        device=torch.device(device),
    )
    arena = Arena(ArenaSettings(32 << 30, 256 << 20, "drop", Path("/tmp")), device == "cuda")
    transport = host_transport(buffers.ring, arena)
    pool = KvBlocks(0, BLOCK, BLOCKS * sequences)
    kept = ScoreCache(lambda: pool, buffers.scores.shape[1], 4096)
    return WorkerSession(
        RankMemory(buffers, taps, transport, arena, kept), StepRules(4096, only_armed=True)
    )


def make_plan(layers: int, hidden: int, what: str, prompt: int = PROMPT) -> Any:
    """Return a resolved plan that captures or steers every layer of every token, or scores it."""
    from midstream import Capture, Probe, Steer
    from midstream.plan import ModelShape, Plan, Prompt
    from midstream.plan.resolve.resolve import resolve

    taps = frozenset(("resid_post", layer) for layer in range(layers))
    shape = ModelShape(num_layers=layers, hidden_size=hidden, taps=taps, reasons={})
    if what in CAPTURES:
        plan = Plan.make(capture=Capture(layers=[layers // 2] if what == ONE_LAYER else "all"))
    elif what in PROBED:
        vectors = [[0.1 + number] * hidden for number in range(PROBES)]
        plan = Plan.make(
            probes=[
                Probe(vector, number * layers // PROBES, name=f"p{number}")
                for number, vector in enumerate(vectors)
            ]
        )
    else:
        plan = Plan.make(edits=[Steer([0.1] * hidden, layer=layer) for layer in range(layers)])
    return resolve(plan, shape, Prompt(prompt), None, ())


def _pretend(session: Any) -> None:
    """Fill the tally as the op would: every tap fired, and did as planned."""
    recorder = session._recorder  # noqa: SLF001
    current = recorder.prepared
    tally = recorder._buffers.tally  # noqa: SLF001
    if current is not None:
        plan = current.plan
        rows = torch.zeros(plan.tokens.shape[0], tally.shape[1], dtype=torch.int32)
        rows[plan.active, 0] = recorder._signature.signature  # noqa: SLF001
        rows[plan.active, 1] = torch.from_numpy(plan.most.astype(np.int32))
        rows[plan.active, 2] = torch.from_numpy(plan.captures.astype(np.int32))
        tally[: rows.shape[0]].copy_(rows)


def _no_ids() -> torch.Tensor:
    raise AssertionError("no plan needs token ids")


if __name__ == "__main__":
    sys.exit(main())
