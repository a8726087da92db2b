"""Random SAEs of the package `sae_lens`, in its own files: the reference of tests.

`sae_lens` takes seconds to import: it is imported where it is used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.end_oracle import EndOracle
from support.oracle_edits import At

MLP = {"hook_name": "blocks.2.mlp.hook_in", "hook_name_out": "blocks.2.hook_mlp_out"}
# By name: the class without "Config", and what its configuration says beyond the sizes.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "standard": ("StandardSAE", {}),
    "standard-unbiased": ("StandardSAE", {"apply_b_dec_to_input": False}),
    "rescaled": ("StandardSAE", {"normalize_activations": "constant_norm_rescale"}),
    "normed": ("JumpReLUSAE", {"normalize_activations": "layer_norm"}),
    "jumprelu": ("JumpReLUSAE", {"apply_b_dec_to_input": False}),
    "gated": ("GatedSAE", {}),
    "topk": ("TopKSAE", {"k": 7}),
    "topk-norms": ("TopKSAE", {"k": 5, "rescale_acts_by_decoder_norm": True}),
    "batchtopk": ("BatchTopKTrainingSAE", {"k": 6.5, "rescale_acts_by_decoder_norm": False}),
    "batchtopk-norms": ("BatchTopKTrainingSAE", {"k": 6.5}),
    "matryoshka": ("MatryoshkaBatchTopKTrainingSAE", {"k": 6, "matryoshka_widths": [20, 60]}),
    "transcoder": ("Transcoder", MLP),
    "skip": ("SkipTranscoder", MLP),
    "jumping": ("JumpReLUTranscoder", MLP),
    "jumping-skip": ("JumpReLUSkipTranscoder", MLP),
}


def write_random(kind: str, folder: Path, width: int, features: int, hook: str) -> Path:
    """Write a random SAE of a kind as `sae_lens` does."""
    name, given = KINDS[kind]
    found = _made(name, width, features, {"hook_name": hook, **given})
    draw = torch.Generator().manual_seed(sum(kind.encode()))
    with torch.no_grad():
        for key, tensor in found.state_dict().items():
            if key == "topk_threshold":
                tensor.fill_(0.8)
            elif "threshold" in key:
                tensor.copy_(torch.rand(tensor.shape, generator=draw))
            elif key == "W_dec":
                lengths = 0.5 + torch.rand(features, 1, generator=draw)
                tensor.copy_(torch.randn(tensor.shape, generator=draw) * lengths)
            elif tensor.dim() == 2:
                tensor.copy_(torch.randn(tensor.shape, generator=draw) / width**0.5)
            else:
                tensor.copy_(0.4 * torch.randn(tensor.shape, generator=draw))
    return _saved(found, folder)


def trained(provider: Any, width: int, features: int, steps: int, batch: int) -> tuple[Any, Any]:
    """Train a TopK SAE with SAELens' trainer; return it, and the loss of each step, [steps]."""
    from sae_lens.config import SAETrainerConfig
    from sae_lens.saes.topk_sae import TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.training.sae_trainer import SAETrainer

    torch.manual_seed(0)
    sae = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=width, d_sae=features, k=8))
    settings = SAETrainerConfig(
        total_training_samples=steps * batch, train_batch_size_samples=batch, lr=3e-3,
        lr_end=3e-4, device="cpu",
    )  # fmt: skip
    trainer, losses = SAETrainer(settings, sae, provider), []
    step = trainer.step

    def recorded(rows: Tensor) -> Any:
        output = step(rows)
        losses.append(output.losses["mse_loss"].item())
        return output

    trainer.step = recorded
    trainer.fit()
    return sae, np.array(losses)


def explained(sae: Any, rows: Tensor) -> float:
    """Return the part of the variance of rows, [n, width], that an SAE explains."""
    with torch.no_grad():
        left = (sae(rows) - rows).pow(2).sum(-1).mean()
    return 1 - float(left / (rows - rows.mean(0)).pow(2).sum(-1).mean())


def read(folder: Path) -> Any:
    """Return what `sae_lens` reads of a folder, in float64."""
    import sae_lens

    return sae_lens.SAE.load_from_disk(folder).to(torch.float64)


def features(sae: Any, x: Tensor) -> Tensor:
    """Return the activations, float64 [n, features]."""
    with torch.no_grad():
        found: Tensor = sae.encode(x.double())
    return found


def reconstructed(
    sae: Any, x: Tensor, h: Tensor, values: Mapping[int, float], mode: str, error: bool
) -> Tensor:
    """Return what a reconstruction with changed features makes of h, float64 [n, width].

    Args:
        sae: what `read` returns.
        x: what it encodes; of an SAE the same as `h`.
        h: what is replaced.
        values: the changed features; for "ablate" their values are not read.
        mode: what is done to them.
        error: whether x̂(a') − x̂(a) is added to h, instead.
    """

    def decoded(a: Tensor) -> Tensor:
        sae.encode(x.double())  # a normalisation is undone as of the vectors last encoded
        found: Tensor = sae.decode(a)
        return found

    with torch.no_grad():
        a = sae.encode(x.double())
        changed = a.clone()
        for index, value in values.items():
            match mode:
                case "set":
                    changed[:, index] = value
                case "add":
                    changed[:, index] += value
                case "scale":
                    changed[:, index] *= value
                case "ablate":
                    changed[:, index] = 0
        change = decoded(changed) - decoded(a)
        return (h.double() if error else sae(x.double())) + change


def _made(name: str, width: int, features: int, given: dict[str, Any]) -> Any:
    import sae_lens
    from sae_lens.saes.sae import SAEMetadata

    fields = dict(given)
    places = {key: fields.pop(key) for key in ("hook_name", "hook_name_out") if key in fields}
    config = getattr(sae_lens, f"{name}Config")
    if "Transcoder" in name:
        fields["d_out"], fields["apply_b_dec_to_input"] = width, False
    made = config(d_in=width, d_sae=features, metadata=SAEMetadata(**places), **fields)
    return getattr(sae_lens, name)(made)


def _saved(sae: Any, folder: Path) -> Path:
    import sae_lens

    is_trained = isinstance(sae, sae_lens.TrainingSAE)
    (sae.save_inference_model if is_trained else sae.save_model)(folder)
    return folder


@dataclass(frozen=True)
class By:
    """An edit of the reference: what it makes of vectors, and where; of those of another tap, too,
    where it reads one."""

    change: Callable[..., Tensor]
    taps: tuple[tuple[str, int], ...] = (("resid_post", 1),)
    reads: tuple[str, int] | None = None


class Oracle(EndOracle):
    """Any changes too."""

    def taps(self, edit: Any) -> set[Any]:
        return set(edit.taps) if isinstance(edit, By) else super().taps(edit)

    def _apply(self, one: At, tap: Any, h: np.ndarray) -> np.ndarray:
        if not isinstance(one.edit, By):
            return super()._apply(one, tap, h)
        chosen = [position for position in range(len(h)) if one.where(position)]
        out = h.copy()
        given = [torch.from_numpy(h[chosen])]
        if one.edit.reads is not None:
            given.append(self._seen.values[one.edit.reads][chosen].double())
        out[chosen] = one.edit.change(*given).numpy()
        return out


MLP_TAPS = ("mlp_in", 2), ("mlp_out", 2)
CHANGED = {3: 4.0, 8: 0.0, 77: -1.5}


def is_transcoder(name: str) -> bool:
    return "hook_name_out" in KINDS.get(name, ("", {}))[1]


def as_saelens(folders: Path, name: str, **asked: Any) -> By:
    """The reference of `Reconstruct(name, …)`."""
    sae = read(folders / name)
    index, mode = asked.get("index") or {}, asked.get("mode", "set")
    values = index if isinstance(index, dict) else dict.fromkeys(index, asked.get("value", 0.0))
    error = asked.get("error", False)

    def change(h: Tensor, x: Tensor | None = None) -> Tensor:
        return reconstructed(sae, h if x is None else x, h, values, mode, error)

    if is_transcoder(name):
        return By(change, MLP_TAPS[1:], MLP_TAPS[0])
    return By(change)
