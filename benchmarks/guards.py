"""Cost of probes of every token, which a server asks of all traffic.

    python benchmarks/guards.py [--shapes 8b] [--probes 16] [--plain-engines 2] [--kv-gib 14]
        [--rounds 7] [--seconds 400] [--workloads decode] [--profiles FOLDER] [--json FILE]

Seconds, with the prefix cache on, of

- a step in which 256 sequences generate a token each;
- a prompt of 8,000 tokens until its first token (prefill);
- a prompt that came before until its first token (cached): the cache serves all but its last block;
- a request of such a prompt and one token until it ends, with all scores (answer).

Linear probes, at layers spread over the model: "probes" and "probes that stop" (at scores that are
never reached) are asked for by each request, "of all traffic" are server-wide. An attention probe
with eight heads, in the middle of the model, is server-wide. Variants take turns as in overhead.py;
prompts of the prefill are new in each round. The JSON has how many tokens the cache served. For
--profiles see overhead.py.
"""

from __future__ import annotations

import functools
import itertools
import random
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

BATCH, SKIPPED, STEPS, LONG = 256, 8, 48, 8000
NEVER = 1e30
SERVER_WIDE = ("all traffic", "attention")
TAPPED = "midstream"
HEADS = 8
ASKED = {
    "idle": "",
    "probes": "probes",
    "probes that stop": "stop",
    "probes of all traffic": "all traffic",
    "attention probe of all traffic": "attention",
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
        environment = engines.FUNCTIONS_TO_WORKERS if args.profiles else {}
        with run.limited(), run.engines(makers, ("plain", TAPPED), **environment) as started:
            into |= started[TAPPED].call(engines.describe)
            for name in args.workloads:
                function = WORKLOADS[name]
                run.measure(into, name, variants(started, function, shape, args.probes))
                if args.profiles:
                    folder = args.profiles.resolve() / f"{shape}-{name}"
                    sampled = functools.partial(profile, folder, function)
                    for call in variants(started, sampled, shape, args.probes).values():
                        call()
            into["cached_tokens"] = {"of": LONG}
            for asked in filter(None, ASKED.values()):
                served = started[TAPPED].call(num_cached, asked, shape, args.probes)
                into["cached_tokens"][asked] = served
                run.stage(f"{shape}: {asked}: the cache served {served} of {LONG} tokens")
    return run.finish()


def variants(started: Any, function: Any, shape: str, count: int) -> dict[str, Any]:
    """Return what runs in turn, by name."""
    plain = {name: (name if name in started else overhead.PLAIN[0], "") for name in overhead.PLAIN}
    tapped = {name: (TAPPED, asked) for name, asked in ASKED.items()}
    return {
        name: functools.partial(started[engine].call, function, asked, shape, count)
        for name, (engine, asked) in {**plain, **tapped}.items()
        if engine in started
    }


def profile(folder: Path, function: Any, llm: Any, name: str, shape: str, count: int) -> None:
    """Run a workload, and write where its time goes to a file of the variant."""
    kind = name or ("idle" if hasattr(llm, "steering") else "plain")
    file = folder / f"{kind.replace(' ', '-')}.txt"
    overhead.sampled(llm, file, function, name, shape, count)


def probes(name: str, shape: str, count: int) -> list[Any]:
    """Return the probes of a variant."""
    from midstream import Probe
    from midstream.plan import AttentionPool, Stop

    if not name:
        return []
    layers = int(shapes.SHAPES[shape]["num_hidden_layers"])
    if name == "attention":
        vectors = [overhead.vector(shape, 1000 + number) for number in range(2 * HEADS)]
        heads = AttentionPool(query=vectors[:HEADS], value=vectors[HEADS:])
        return [Probe(attention_pool=heads, layer=layers // 2, name=name)]
    act = Stop(above=NEVER) if name == "stop" else None
    return [
        Probe(overhead.vector(shape, number), number * layers // count, name=f"p{number}", act=act)
        for number in range(count)
    ]


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
        return overhead.last_steps(llm, BATCH, SKIPPED, STEPS, of_batch)[0]


def prefill(llm: Any, name: str, shape: str, count: int) -> float:
    """Return the seconds to the first token of a prompt that nobody has seen."""
    llm.reset_prefix_cache()
    with asking(llm, name, shape, count) as arguments:
        return _first_token(llm, _prompt(f"new {next(_new)} {name}"), arguments)


def cached(llm: Any, name: str, shape: str, count: int) -> float:
    """Return the seconds to the first token of a prompt that came before, with the same probes."""
    with asking(llm, name, shape, count) as arguments:
        _first_token(llm, _prompt(f"again {name}"), arguments)
        return _first_token(llm, _prompt(f"again {name}"), arguments)


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
