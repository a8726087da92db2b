"""Cost of attention rows: `Attention` in a request, against plain vLLM and against eager attention.

    python benchmarks/attention_cost.py [--shapes 8b] [--length 8192] [--seconds 280] [--json FILE]

One prompt is in the prefix cache, but for its end. "cached prompt": seconds of a call with one
generated token, by the rows of attention that it asks for. "decode": seconds of one step in which
each sequence generates a token and asks for the rows of it. Variants take turns as in overhead.py.

"eager attention" is what transformers computes for `output_attentions=True`, on the same GPU and
with vectors of the same size: products, a softmax in float32 and the weighted sum, for every layer;
for the whole prompt, and for the same rows alone.
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engines
import overhead
import shapes

TOKENS = 36
ROOM = 64  # tokens that a prompt leaves for what is generated
ROWS = (1, 32)


def main() -> int:
    """Measure every shape, and write the table."""
    parser = engines.arguments(__doc__, list(shapes.SHAPES))
    parser.add_argument("--length", type=int, default=8192, help="tokens of a request in all")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 4])
    args = parser.parse_args()
    run = engines.Run("attention_cost", args, length=args.length, shapes={})
    for shape in args.shapes:
        makers = _makers(shape, args)
        with run.limited(), run.engines(makers, ("plain", "midstream", "eager")) as started:
            into = run.results["shapes"][shape] = {**started["midstream"].call(engines.describe)}
            for rows in ROWS:
                variants = _variants(started, cached_prompt, shape, rows, 1, args.length)
                for what, count in (("the whole prompt", args.length - ROOM), ("these rows", rows)):
                    name = f"eager attention alone, {what}, every layer"
                    variants[name] = functools.partial(started["eager"].call, eager, count)
                run.measure(into, f"cached prompt, {rows} query rows", variants)
            for batch in args.batches:
                variants = _variants(started, decode_step, shape, 1, batch, args.length)
                run.measure(into, f"decode, {batch} sequences", variants)
    return run.finish()


def _makers(shape: str, args: Any) -> dict[str, tuple[Any, ...]]:
    model = shapes.write(shape, engines.CACHE)
    more = {"max_model_len": args.length, "enable_prefix_caching": True, "max_num_seqs": 16}
    settings = engines.settings(shape, args, **more)
    makers: dict[str, tuple[Any, ...]] = dict.fromkeys(
        overhead.PLAIN, (engines.plain, model, settings)
    )
    midstream = {"sites": ["resid_post", "rot_q"]}
    makers["midstream"] = engines.tapped, model, settings, midstream
    makers["eager"] = Eager, shapes.SHAPES[shape], args.length
    return makers


def _variants(
    started: Any, function: Any, shape: str, rows: int, batch: int, length: int
) -> dict[str, Any]:
    """Return what runs once, by name: the engines without a request, and forms of `Attention`."""
    of = rows, batch, length
    found = {
        "idle" if name == "midstream" else name: functools.partial(
            started[name].call, function, None, *of
        )
        for name in (*overhead.PLAIN, "midstream")
    }
    call = functools.partial(started["midstream"].call, function)
    for name in asked(shape):
        found[name] = functools.partial(call, name, *of)
    return found


def asked(shape: str) -> dict[str, dict[str, Any]]:
    """Return arguments of `Attention` by the name of the variant."""
    from midstream.plan import Entropy, Mass, TopKeys

    layer = [shapes.SHAPES[shape]["num_hidden_layers"] // 2]
    return {
        "16 largest, one layer": {"layers": layer, "reduce": TopKeys(16)},
        "16 largest, every layer": {"layers": "all", "reduce": TopKeys(16)},
        "16 largest, one head of every layer": {"layers": "all", "heads": 0, "reduce": TopKeys(16)},
        "mass of 64 keys, every layer": {"layers": "all", "reduce": Mass(slice(0, 64))},
        "entropy, every layer": {"layers": "all", "reduce": Entropy()},
    }


def _request(llm: Any, name: str | None, batch: int, length: int, queries: Any) -> Any:
    """Return prompts and the further arguments of `generate`."""
    prompts = overhead.random_prompts(batch, length - ROOM)
    if name is None:
        return prompts, {}
    from midstream import Attention

    shape = _shape_of(llm)
    return prompts, {"capture": Attention(queries=queries, **asked(shape)[name])}


def _shape_of(llm: Any) -> str:
    return Path(llm.llm_engine.model_config.model).name.removeprefix("shape-")


def cached_prompt(llm: Any, name: str | None, rows: int, batch: int, length: int) -> float:
    """Return the seconds of a call for the last rows of a prompt that is cached before them."""
    stop = length - ROOM
    prompts, given = _request(llm, name, batch, length, slice(stop - rows, stop))
    params = overhead.sampling(1)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, **given)
    return time.perf_counter() - start


def decode_step(llm: Any, name: str | None, rows: int, batch: int, length: int) -> float:
    """Return the mean seconds of steps in which each sequence generates a token, `rows` = 1."""
    prompts, given = _request(llm, name, batch, length, "generated")
    with overhead.core_steps(llm, batch) as steps:
        llm.generate(prompts, overhead.sampling(TOKENS), use_tqdm=False, **given)
    return steps.mean()


class Eager:
    """Attention as transformers computes it with `output_attentions=True`, of one layer's size."""

    def __init__(self, shape: dict[str, Any], length: int) -> None:
        """Draw queries, keys and values of a prompt, bfloat16 on a GPU.

        Args:
            shape: a value of `shapes.SHAPES`.
            length: number of tokens, that of a request.
        """
        import torch

        gpu = torch.cuda.is_available()
        kind = {
            "device": "cuda" if gpu else "cpu",
            "dtype": torch.bfloat16 if gpu else torch.float32,
        }
        self.layers = shape["num_hidden_layers"]
        self.groups = shape["num_attention_heads"] // shape["num_key_value_heads"]
        size = length - ROOM, shape["head_dim"]
        self.q = torch.randn(shape["num_attention_heads"], *size, **kind)
        self.k = torch.randn(shape["num_key_value_heads"], *size, **kind)
        self.v = torch.randn(shape["num_key_value_heads"], *size, **kind)


def eager(one: Eager, rows: int) -> float:
    """Return the seconds of the last rows' weights and outputs, for every layer."""
    import torch

    q, length = one.q[:, -rows:], one.q.shape[1]
    at = torch.arange(length - rows, length, device=q.device)[:, None]
    mask = torch.zeros(rows, length, dtype=q.dtype, device=q.device)
    mask.masked_fill_(torch.arange(length, device=q.device) > at, torch.finfo(q.dtype).min)

    def wait() -> float:
        if q.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    start = wait()
    for _ in range(one.layers):
        keys, values = (each.repeat_interleave(one.groups, 0) for each in (one.k, one.v))
        weights = q @ keys.transpose(1, 2) * q.shape[-1] ** -0.5 + mask
        weights = torch.softmax(weights, -1, dtype=torch.float32).to(q.dtype)
        _ = weights @ values
    return wait() - start


if __name__ == "__main__":
    sys.exit(main())
