"""Cost of probes of every token, which a server asks of all traffic.

    python benchmarks/guards.py [--shapes 8b] [--probes 16] [--plain-engines 2] [--kv-gib 6]
        [--rounds 7] [--seconds 400] [--workloads decode] [--profiles FOLDER] [--json FILE]

Seconds, with the prefix cache on, of

- a step in which 256 sequences generate a token each;
- a prompt of 8,000 tokens until its first token (prefill);
- a prompt that came before until its first token (cached): the cache serves all but its last block;
  the median of nine;
- a request of such a prompt and one token until it ends, with all scores (answer).

Linear probes, at layers spread over the model: "probes" and "probes that stop" (at scores that are
never reached) are asked for by each request, "of all traffic" are server-wide. An attention probe
with eight heads, in the middle of the model, is server-wide. One engine taps every layer, another
one ("their layers tapped") those of the probes alone, as a server for guards would. Variants take
turns as in overhead.py; prompts of the prefill are new in each round. The JSON has how many tokens
the cache served. For --profiles see overhead.py.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engines
import overhead
import shapes

BATCH, TOKENS, LONG = 256, 116, 8000
REPEATS = 9  # of a cached prompt: the host decides its time, and varies
NEVER = 1e30
SERVER_WIDE = ("all traffic", "attention")
TAPPED, FEW = "midstream", "midstream, few layers"
HEADS = 8
# By variant: the engine, and what is asked of it.
ASKED = {
    "idle": (TAPPED, ""),
    "probes": (TAPPED, "probes"),
    "probes that stop": (TAPPED, "stop"),
    "probes of all traffic": (TAPPED, "all traffic"),
    "probes of all traffic, their layers tapped": (FEW, "all traffic"),
    "attention probe of all traffic": (TAPPED, "attention"),
    "attention probe of all traffic, their layers tapped": (FEW, "attention"),
}
_new = itertools.count()


def main() -> int:
    """Measure every shape, and write the table."""
    parser = engines.arguments(__doc__, list(shapes.SHAPES))
    parser.add_argument("--probes", type=int, default=16)
    parser.add_argument("--plain-engines", type=int, choices=(1, 2), default=2)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--profiles", type=Path, help="folder for a file of each variant")
    args = parser.parse_args()
    run = engines.Run("guards", args, probes=args.probes, shapes={})
    for shape in args.shapes:
        into = run.results["shapes"][shape] = {}
        model = shapes.write(shape, engines.CACHE)
        settings = engines.settings(shape, args, enable_prefix_caching=True, max_model_len=8192)
        names = overhead.PLAIN[: args.plain_engines]
        makers: dict[str, tuple[Any, ...]] = dict.fromkeys(names, (engines.plain, model, settings))
        makers[TAPPED] = engines.tapped, model, settings, {"probes": args.probes}
        few = {"probes": args.probes, "layers": sorted(set(probed(shape, args.probes)))}
        makers[FEW] = engines.tapped, model, settings, few
        environment = engines.FUNCTIONS_TO_WORKERS if args.profiles else {}
        with run.limited(), run.engines(makers, ("plain", TAPPED, FEW), **environment) as started:
            into |= started[TAPPED].call(engines.describe)
            for name in args.workloads:
                work = WORKLOADS[name], shape, args.probes
                run.measure(into, name, variants(started, *work))
                if args.profiles:
                    folder = args.profiles.resolve() / f"{shape}-{name}"
                    for variant, call in variants(started, *work, folder).items():
                        run.stage(f"{name}: profile of {variant}")
                        call()
            into["cached_tokens"] = {"of": LONG}
            for asked in ("probes", "stop", *SERVER_WIDE):
                served = started[TAPPED].call(num_cached, asked, shape, args.probes)
                into["cached_tokens"][asked] = served
                run.stage(f"{shape}: {asked}: the cache served {served} of {LONG} tokens")
    return run.finish()


def variants(
    started: Any, function: Any, shape: str, count: int, profiles: Path | None = None
) -> dict[str, Any]:
    """Return what runs in turn, by name; with a folder, what profiles it."""
    plain = {name: (name if name in started else overhead.PLAIN[0], "") for name in overhead.PLAIN}
    calls = {}
    for name, (engine, asked) in {**plain, **ASKED}.items():
        if engine in started:
            given = function, asked, shape, count
            if profiles is not None:
                file = profiles / f"{re.sub(r'[, ]+', '-', name)}.txt"
                given = overhead.sampled, file, *given
            calls[name] = functools.partial(started[engine].call, *given)
    return calls


def probes(name: str, shape: str, count: int) -> list[Any]:
    """Return the probes of a variant."""
    from midstream import Probe
    from midstream.plan import AttentionPool, Stop

    if not name:
        return []
    layers = probed(shape, count)
    if name == "attention":
        vectors = [overhead.vector(shape, 1000 + number) for number in range(2 * HEADS)]
        heads = AttentionPool(query=vectors[:HEADS], value=vectors[HEADS:])
        return [Probe(attention_pool=heads, layer=layers[count // 2], name=name)]
    act = Stop(above=NEVER) if name == "stop" else None
    return [
        Probe(overhead.vector(shape, number), layer, name=f"p{number}", act=act)
        for number, layer in enumerate(layers)
    ]


def probed(shape: str, count: int) -> list[int]:
    """Return the layers of so many probes."""
    layers = int(shapes.SHAPES[shape]["num_hidden_layers"])
    return [number * layers // count for number in range(count)]


@contextmanager
def asking(llm: Any, name: str, shape: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield `generate`'s arguments of a request, while server-wide probes are set."""
    asked = probes(name, shape, count)
    if name not in SERVER_WIDE:
        yield {"probes": asked} if asked else {}
        return
    llm.steering.set(asked)
    try:
        yield {}
    finally:
        llm.steering.clear()


def decode(llm: Any, name: str, shape: str, count: int) -> float:
    """Return the mean seconds of steps in which each sequence generates a token."""
    llm.reset_prefix_cache()  # no engine evicts more than another, however many variants it runs
    with asking(llm, name, shape, count) as arguments:
        of_batch = {field: [value] * BATCH for field, value in arguments.items()}
        return overhead.full_steps(llm, BATCH, TOKENS, of_batch)[0]


def prefill(llm: Any, name: str, shape: str, count: int) -> float:
    """Return the seconds to the first token of a prompt that nobody has seen."""
    llm.reset_prefix_cache()
    with asking(llm, name, shape, count) as arguments:
        return _first_token(llm, _prompt(f"new {next(_new)} {name}"), arguments)


def cached(llm: Any, name: str, shape: str, count: int) -> float:
    """Return the median seconds to the first token of a prompt that came before with its probes."""
    with asking(llm, name, shape, count) as arguments:
        prompt = _prompt(f"again {name}")
        _first_token(llm, prompt, arguments)
        return statistics.median(_first_token(llm, prompt, arguments) for _ in range(REPEATS))


def answer(llm: Any, name: str, shape: str, count: int) -> float:
    """Return the seconds of a request of a prompt that came before, and one token."""
    return _again(llm, name, shape, count)[0]


def num_cached(llm: Any, name: str, shape: str, count: int) -> int:
    """Return how many tokens of a prompt that came before the cache serves."""
    return _again(llm, name, shape, count)[1]


def _again(llm: Any, name: str, shape: str, count: int) -> tuple[float, int]:
    with asking(llm, name, shape, count) as arguments:
        prompt, params = _prompt(f"again {name}"), overhead.sampling(1)
        llm.generate([prompt], params, use_tqdm=False, **arguments)
        start = time.perf_counter()
        (output,) = llm.generate([prompt], params, use_tqdm=False, **arguments)
        return time.perf_counter() - start, output.num_cached_tokens or 0


def _first_token(llm: Any, prompt: dict[str, Any], arguments: dict[str, Any]) -> float:
    start = time.perf_counter()
    with overhead.step_ends(llm) as ends:
        llm.generate([prompt], overhead.sampling(4), use_tqdm=False, **arguments)
    return ends[0] - start


@functools.cache
def _prompt(seed: str) -> dict[str, Any]:
    draw = random.Random(seed)
    return {"prompt_token_ids": [draw.randrange(3, 500) for _ in range(LONG)]}


WORKLOADS = {"decode": decode, "prefill": prefill, "cached": cached, "answer": answer}

if __name__ == "__main__":
    sys.exit(main())
