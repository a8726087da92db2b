"""A tiny model in an engine beside transformers' own attention weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from support import tiny
from support.engines import HAS_GPU, generated, greedy, tokens
from support.inner_cases import HEADS
from torch import Tensor

from midstream import Attention, Probe
from midstream.plan import Mass

TOLERANCE = 5e-4 if HAS_GPU else 1e-4  # a GPU sums in its own order
_SEQUENCE = "sliding_attention", "full_attention", "sliding_attention"


def _gemma2() -> hf.PretrainedConfig:
    """Its products are capped where most of them are."""
    return hf.Gemma2Config(
        **tiny._GROUPED,
        sliding_window=16,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=1.5,
        layer_types=list(_SEQUENCE),
    )


# Architectures, and the site at which their queries are.
MODELS: dict[str, tuple[tiny.Tiny, str]] = {
    "llama": (HEADS, "rot_q"),
    "qwen3": (tiny.MODELS["qwen3"], "rot_q"),
    "gemma2": (tiny.Tiny(_gemma2), "rot_q"),
    "gemma3": (tiny.MODELS["gemma3"], "rot_q"),
    "gpt2": (tiny.MODELS["gpt2"], "q"),
    "opt": (tiny.MODELS["opt"], "q"),
    "phi3": (tiny.MODELS["phi3"], "rot_q"),
}


@dataclass(frozen=True)
class AttentionServed:
    """One architecture in an engine, and the reference."""

    model: Any
    llm: Any

    def ask(
        self, prompts: Sequence[list[int]], capture: Any, count: int = 4, **asked: Any
    ) -> list[Any]:
        """Outputs of several prompts with the same captures."""
        params = asked.pop("params", None) or greedy(count, detokenize=False)
        captures = [list(capture) if isinstance(capture, list) else capture] * len(prompts)
        prompts = [tokens(one) for one in prompts]
        return self.llm.generate(prompts, params, capture=captures, use_tqdm=False, **asked)

    def weights(self, prompt: list[int], output: Any) -> list[Tensor]:
        """Transformers' weights of each layer, [queries, heads, keys]."""
        return weights_of(self.model, [*prompt, *generated(output)][:-1])

    def assert_is(self, prompt: list[int], output: Any, asked: Sequence[Attention]) -> float:
        """What an output has is what transformers has, reduced; returns the largest error."""
        weights = self.weights(prompt, output)
        return max(
            difference(output.attention[one.name, layer], one, weights[layer], prompt)
            for one in asked
            for layer in output.attention.layers
            if (one.name, layer) in output.attention
        )

    def scores_are(self, prompt: list[int], output: Any, probes: Sequence[Probe]) -> float:
        """The scores of an output are the means of transformers' weights; returns the largest
        error.
        """
        weights = self.weights(prompt, output)
        largest = 0.0
        for probe in probes:
            at = output.probes.positions_of(probe.name)
            assert len(at)
            (layer,) = probe.layers.indices
            heads = list(probe.heads) or list(range(weights[layer].shape[1]))
            mine = weights[layer][at][:, heads]
            if isinstance(probe.attention, Mass):
                (span,) = probe.attention.positions.include
                expected = mine[..., span.start : span.stop].sum(-1).mean(-1)
            else:
                expected = -torch.xlogy(mine, mine).sum(-1).mean(-1)
            found = output.probes[probe.name]
            assert found.shape == expected.shape
            largest = max(largest, float((found - expected).abs().max()))
        return largest


def weights_of(model: Any, ids: list[int]) -> list[Tensor]:
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_attentions=True).attentions
    return [each[0].transpose(0, 1) for each in found]


def difference(rows: Any, asked: Attention, weights: Tensor, prompt: list[int]) -> float:
    """The largest difference between rows and the same reduction of the reference's weights."""
    heads = asked.heads or tuple(range(weights.shape[1]))
    assert rows.heads == heads
    if not len(rows):
        return 0.0  # all were dropped
    expected = weights[rows.positions][:, list(heads)]
    reduce = asked.to_dict()["reduce"]
    if reduce in ("full", "scores"):
        seen = int(rows.positions[-1]) + 1
        assert rows.values.shape == (len(rows), len(heads), seen)
        found = rows.values if reduce == "full" else torch.softmax(rows.values, -1)
        return float((found - expected[..., :seen]).abs().max())
    if reduce == "entropy":
        expected = -torch.xlogy(expected, expected).sum(-1)
    elif "mass" in reduce:
        ((start, stop, _),) = [each["slice"] for each in reduce["mass"]["positions"]]
        expected = expected[..., start:stop].sum(-1)
    else:
        return _top_difference(rows, expected, reduce["top_keys"])
    assert rows.values.shape == expected.shape
    return float((rows.values - expected).abs().max())


def _top_difference(rows: Any, expected: Tensor, k: int) -> float:
    assert rows.values.shape == rows.keys.shape == (*expected.shape[:2], k)
    largest = torch.nn.functional.pad(expected, (0, k)).topk(k).values
    error = (rows.values - largest).abs().max()
    named = rows.keys >= 0
    assert torch.equal(named, largest > 0)
    # Each weight is that of the key which is named.
    own = torch.where(named, expected.gather(-1, rows.keys.clamp(min=0)), 0)
    return float(torch.maximum(error, (own - rows.values).abs().max()))


def reference(name: str, folder: Path) -> tuple[Path, Any]:
    """The model's folder, and the reference."""
    path = tiny.make(f"{name}-attention", folder, MODELS[name][0])
    return path, eager(path)


def eager(path: Path) -> Any:
    """The reference on a model's folder."""
    model = hf.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
