"""Host time of captures and edits in each step: the Python around a forward pass, without the pass.

    python benchmarks/step_cost.py [--sequences 256] [--layers 32] [--hidden 4096] [--rounds 5] \
        [--json FILE]

A batch that generates, with a row of every sequence captured (or edited) at each layer. Figures are
medians over rounds of the median over steps, of the hook before the forward pass and the hook after
it. On a CUDA device the
work is queued as in an engine, and rows are transferred while the next step is prepared. On a CPU
the times include the copy of the rows, so they are also measured with vectors of one number.

`prompts`: steps of 16 prompts of 512 tokens, all new, with every layer of every token captured. The
time before includes adding the requests, and there is a third: ending them and collecting their
rows.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

import engines

PROMPT, STEPS = 8, 200
PROMPTS, LENGTH, PROMPT_STEPS = 16, 512, 80


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
        for what in ("edits", "captures")
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
    """Return the microseconds of both hooks."""
    from midstream.plan.resolve.wire import to_bytes
    from midstream.runtime.worker.step.step_batch import StepBatch

    session = make_session(sequences, layers, hidden, device)
    plan = to_bytes(make_plan(layers, hidden, what))
    names = [f"r{n}" for n in range(sequences)]
    for name in names:
        session.requests.add(name, name, plan)
    scheduled = np.ones(sequences, np.int32)
    seconds: list[tuple[float, float]] = []
    for step in range(STEPS):
        computed = np.full(sequences, PROMPT + step, np.int32)
        view = StepBatch(names, scheduled, computed, sequences, _no_ids)
        start = time.perf_counter()
        session.before_forward(view)
        between = time.perf_counter()
        _pretend(session)
        queued = time.perf_counter()
        session.after_forward()
        seconds.append((between - start, time.perf_counter() - queued))
        if step % 10 == 9:
            # Fetch rows like a front end, so that they do not accumulate.
            reached = PROMPT + step
            with session.collection.collect_partial({name: {name: reached} for name in names}):
                pass
    with session.collection.collect(names):
        pass
    late = seconds[STEPS // 4 :]
    return {
        "before_us": 1e6 * statistics.median(before for before, _ in late),
        "after_us": 1e6 * statistics.median(after for _, after in late),
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
    late = seconds[PROMPT_STEPS // 4 :]
    names = "before_us", "after_us", "collect_us"
    return {
        name: 1e6 * statistics.median(one)
        for name, one in zip(names, zip(*late, strict=True), strict=True)
    }


def make_session(sequences: int, layers: int, hidden: int, device: str) -> Any:
    """Create a worker's session for an engine of that shape."""
    from midstream.runtime.protocol.segments import Room
    from midstream.runtime.worker.session import StepRules, WorkerSession
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
    return WorkerSession(RankMemory(buffers, taps, transport, arena), StepRules(4096))


def make_plan(layers: int, hidden: int, what: str, prompt: int = PROMPT) -> Any:
    """Return a resolved plan that captures or steers every layer of every token."""
    from midstream import Capture, Steer
    from midstream.plan import ModelShape, Plan, Prompt
    from midstream.plan.resolve.resolve import resolve

    taps = frozenset(("resid_post", layer) for layer in range(layers))
    shape = ModelShape(num_layers=layers, hidden_size=hidden, taps=taps, reasons={})
    if what == "captures":
        plan = Plan.make(capture=Capture(layers="all"))
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
