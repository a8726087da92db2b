"""What a capture changes in a compiled model with FP8 weights, under several settings.

`python -m support.quantised_compiled RUN MODEL [QUANTISATION]` runs one engine, and prints tokens
and logprobs.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from support.engines import engine, generated, greedy

TEXTS = (
    "The capital of France is the city of",
    "She said that two and two",
    "Water boils at a hundred degrees, and freezes at",
    "A list of numbers: one, two, three, five, eight,",
    "In the morning we walked along the coast until",
    "def fibonacci(n):\n    if n < 2:\n        return",
)
COUNT = 16
BRANCHES = ["attn_in", "attn_out", "mlp_in", "mlp_out"]
STREAM = ["resid_pre", "resid_mid", "resid_post"]
# vLLM's passes that put quantisation into the kernel before it.
_PASSES = {
    "pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False, "fuse_attn_quant": False}
}
_KERNELS = {**_PASSES, "custom_ops": ["all"]}
_CASTS = {**_PASSES, "inductor_compile_config": {"emulate_precision_casts": True}}


@dataclass(frozen=True)
class Run:
    """One engine.

    Attributes:
        plain: the run of vLLM alone to compare with; empty: it is one.
        compilation: `compilation_config`.
        sites: what is tapped and captured, in all layers.
        always: whether every step runs the tapped model.
        unchanged: whether a capture must not change a bit.
    """

    plain: str = ""
    compilation: Mapping[str, Any] = field(default_factory=dict)
    sites: tuple[str, ...] = ("resid_post",)
    eager: bool = False
    always: bool = False
    unchanged: bool = False


_ALL = (*STREAM, *BRANCHES)
RUNS: dict[str, Run] = {
    "plain": Run(),
    "plain-passes": Run(compilation=_PASSES),
    "plain-kernels": Run(compilation=_KERNELS),
    "plain-casts": Run(compilation=_CASTS),
    "plain-eager": Run(eager=True),
    "default": Run("plain"),
    "default-all": Run("plain", sites=_ALL),
    "passes-all": Run("plain-passes", _PASSES, _ALL),
    "kernels-all": Run("plain-kernels", _KERNELS, _ALL),
    "casts-all": Run("plain-casts", _CASTS, _ALL, unchanged=True),
    "always-all": Run("plain", sites=_ALL, always=True, unchanged=True),
    "eager-all": Run("plain-eager", sites=_ALL, eager=True, unchanged=True),
}


class Apart(NamedTuple):
    """How two runs of the prompts differ: prompts with other tokens, and the largest differences of
    the first token's logprobs and of all until the tokens part.
    """

    prompts: int
    first: float
    logprobs: float

    @property
    def same(self) -> bool:
        return self == Apart(0, 0.0, 0.0)


def apart(ours: list[Any], theirs: list[Any]) -> Apart:
    """Compare answers, each a list of tokens and one of logprobs by token and step."""
    prompts, first, logprobs = 0, 0.0, 0.0
    for (tokens, steps), (others, other_steps) in zip(ours, theirs, strict=True):
        prompts += tokens != others
        for index, (step, other) in enumerate(zip(steps, other_steps, strict=True)):
            gap = max(abs(step[token] - other[token]) for token in step.keys() & other.keys())
            first = max(first, gap) if index == 0 else first
            logprobs = max(logprobs, gap)
            if tokens[index] != others[index]:
                break
    return Apart(prompts, first, logprobs)


def answers(llm: Any, **plan: Any) -> list[Any]:
    """Return tokens and logprobs of each prompt, one request at a time."""
    found = []
    for text in TEXTS:
        params = greedy(COUNT, logprobs=10, detokenize=False)
        output = llm.generate([text], params, use_tqdm=False, **plan)[0]
        steps = output.outputs[0].logprobs
        logprobs = [{str(token): entry.logprob for token, entry in step.items()} for step in steps]
        found.append((generated(output), logprobs))
    return found


def main(name: str, model: str, quantisation: str = "fp8") -> None:
    from midstream import Capture

    run = RUNS[name]
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "quantization": None if quantisation == "none" else quantisation,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "enforce_eager": run.eager,
        "enable_prefix_caching": False,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4], **run.compilation},
    }
    if run.plain:
        tapped = {"sites": list(run.sites), "tapped_model": "always" if run.always else "startup"}
        settings["midstream"] = tapped
    with engine(Path(model), plain=not run.plain, **settings) as llm:
        report = {"idle": answers(llm)}
        if run.plain:
            capture = [Capture("all", list(run.sites))]
            report["captured"] = answers(llm, capture=capture)
            report["again"] = answers(llm)
    sys.stdout.write(f"\n{json.dumps(report)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
