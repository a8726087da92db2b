"""Cost of lenses: `Lens` in a request, against plain vLLM and against decoding rows outside.

    python benchmarks/lens_cost.py [--shapes 8b] [--batches 1 32] [--rounds 5] [--seconds 280] \
        [--json FILE]

Seconds of one step in which each sequence generates a token: the ten likeliest tokens at one layer,
and at every layer, for each sequence, or for one sequence of the batch ("a neighbour asks").
"captured, decoded outside" captures the same rows of every layer, and then puts them through the
final norm and the head in PyTorch on the same GPU, with a second copy of the head. Variants take
turns as in overhead.py.
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

TOKENS, TOP = 36, 10
OUTSIDE = "every layer captured, decoded outside"
# By name: the layers of the lens as a fraction of the depth or "all", and who asks.
LENSES: dict[str, tuple[float | str, bool]] = {
    "lens, one layer": (0.5, True),
    "lens, every layer": ("all", True),
    "lens, every layer, a neighbour asks": ("all", False),
}


def main() -> int:
    """Measure every shape, and write the table."""
    parser = engines.arguments(__doc__, list(shapes.SHAPES))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32])
    args = parser.parse_args()
    run = engines.Run("lens_cost", args, shapes={})
    for shape in args.shapes:
        model, settings = shapes.write(shape, engines.CACHE), engines.settings(shape, args)
        makers: dict[str, tuple[Any, ...]] = dict.fromkeys(
            overhead.PLAIN, (engines.plain, model, settings)
        )
        makers["midstream"] = engines.tapped, model, settings, {"sites": ["resid_post"]}
        with run.limited(), run.engines(makers, ("plain", "midstream")) as started:
            into = run.results["shapes"][shape] = {**started["midstream"].call(engines.describe)}
            for batch in args.batches:
                run.measure(into, f"decode, {batch} sequences", _variants(started, batch))
    return run.finish()


def _variants(started: Any, batch: int) -> dict[str, Any]:
    found = {
        "idle" if name == "midstream" else name: functools.partial(
            started[name].call, decode_step, None, batch
        )
        for name in (*overhead.PLAIN, "midstream")
    }
    call = started["midstream"].call
    for name in LENSES if batch > 1 else [*LENSES][:2]:
        found[name] = functools.partial(call, decode_step, name, batch)
    found["every layer captured"] = functools.partial(call, decode_step, OUTSIDE, batch)
    found[OUTSIDE] = functools.partial(call, decode_outside, batch)
    return found


def _asked(llm: Any, name: str | None, batch: int) -> dict[str, Any]:
    """Return the further arguments of `generate`."""
    if name is None:
        return {}
    from midstream import Capture, Lens

    if name == OUTSIDE:
        return {"capture": Capture("all", phase="generated")}
    layers, all_ask = LENSES[name]
    depth = llm.llm_engine.model_config.hf_text_config.num_hidden_layers
    chosen = "all" if layers == "all" else [int(depth * float(layers))]
    lens = Lens(chosen, top=TOP, phase="generated")
    return {"capture": [[lens] if all_ask or nth == batch - 1 else None for nth in range(batch)]}


def decode_step(llm: Any, name: str | None, batch: int) -> float:
    """Return the mean seconds of steps in which each sequence generates a token."""
    return overhead.full_steps(llm, batch, TOKENS, _asked(llm, name, batch))[0]


def decode_outside(llm: Any, batch: int) -> float:
    """Return the mean seconds of such steps, and of decoding the rows of every layer of one step
    after the call.
    """
    import torch

    given = _asked(llm, OUTSIDE, batch)
    step, outputs = overhead.full_steps(llm, batch, TOKENS, given)
    norm, head = _decoder(llm)
    start, count = time.perf_counter(), 0
    for output in outputs:
        rows = torch.stack([output.activations[tap] for tap in output.activations])
        count += rows.shape[1]
        for few in rows.transpose(0, 1).split(8):
            hidden = norm(few.flatten(0, 1).to(head.device))
            logits = (hidden @ head.T).float()
            logprobs = torch.log_softmax(logits, -1)
            _ = [one.cpu() for one in logprobs.topk(TOP)]
    return step + (time.perf_counter() - start) / count * batch


_DECODERS: dict[int, tuple[Any, Any]] = {}


def _decoder(llm: Any) -> tuple[Any, Any]:
    """Return a copy of the final norm and of the head, on the engine's device."""
    import torch

    if id(llm) not in _DECODERS:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        config = llm.llm_engine.model_config.hf_text_config
        name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        head = llm.parameter(name).to(device)
        scale = llm.parameter("model.norm.weight").to(device)
        eps = config.rms_norm_eps

        def norm(rows: Any) -> Any:
            found = rows.float()
            found = found * torch.rsqrt(found.pow(2).mean(-1, keepdim=True) + eps)
            return found.to(rows.dtype) * scale

        _DECODERS[id(llm)] = norm, head
    return _DECODERS[id(llm)]


if __name__ == "__main__":
    sys.exit(main())
