"""`Twin`: the model of an engine in transformers, for gradients."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midstream.lab.attribution.check import check_same_model
from midstream.lab.attribution.gradient_pass import gradient_pass, plain_pass
from midstream.lab.attribution.load import load_model
from midstream.lab.attribution.logit_functions import logit_function, read_with_ids
from midstream.lab.attribution.model_files import ModelFiles
from midstream.lab.attribution.prompts import PromptReader
from midstream.plan.forms import LayersLike, PositionsLike, SitesLike
from midstream.plan.selection import Layers, Sites, read_taps
from midstream.plan.shape import ModelShape
from midstream.plan.tap_lookup import find_taps
from midstream.sites import ENDS, IN_LAYERS, INNER, Tap
from midstream.validation import at

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from midstream.lab.attribution.hooked.model import HookedModel

_NO_END = "gradients are of sites in layers; resid_pre of layer 0 is what the model embeds"
_FIXED = "transformers makes further values of it, so it cannot be changed there"


class Twin:
    """A transformers model on the weights of an engine, for gradients.

    vLLM computes without gradients. A twin has the weights a second time, frozen, and runs one
    request at a time with plain PyTorch attention.

    Attributes:
        model: name or path of the model.
        shape: its dimensions; `shape.taps` are the (site, layer) that have gradients.
        prompts: reads its prompts.
        hooked: the transformers model with hooks at the sites.
    """

    def __init__(
        self,
        llm: Any,
        *,
        dtype: torch.dtype | str = "float32",
        device: torch.device | str = "cpu",
    ) -> None:
        """Load the weights of an engine's model, from the files that the engine loaded.

        Args:
            llm: a `midstream.LLM`. Later changes of its weights, and LoRA adapters, have no effect
                here.
            dtype: dtype of the weights: "float32", "bfloat16" or "float16".
            device: device of the weights. An engine's GPU has room if the engine leaves some
                (`gpu_memory_utilization`).

        Raises:
            MissingExtraError: transformers is not installed.
            SpecError: the dtype or device does not exist.
            UnsupportedError: the engine's weights are not those of its model's files (they are
                quantised, random or overridden), or transformers cannot load the model.
        """
        self._load(ModelFiles.of(llm), dtype, device)
        if not llm.llm_engine.vllm_config.model_config.skip_tokenizer_init:
            self.prompts.tokenizer = llm.get_tokenizer()
        check_same_model(llm, self.shape)

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        dtype: torch.dtype | str = "float32",
        device: torch.device | str = "cpu",
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Twin:
        """Load a model by its folder or name, without an engine.

        Args:
            model: folder or name.
            dtype, device: as above.
            revision: revision of the name.
            trust_remote_code: whether code of the model's folder may be run.

        Raises:
            MissingExtraError, SpecError, UnsupportedError: as above.
        """
        twin = cls.__new__(cls)
        Twin._load(twin, ModelFiles(str(model), revision, trust_remote_code), dtype, device)
        return twin

    def _load(self, files: ModelFiles, dtype: Any, device: Any) -> None:
        self.model = files.model
        self.hooked = load_model(files, dtype=dtype, device=device)
        self.shape = _shape_of(self.hooked)
        self.prompts = PromptReader(
            files.load_tokenizer(), self.hooked.vocabulary, self.hooked.max_length
        )

    def tokens(self, prompt: Any) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: a text, token ids, messages of a chat, or vLLM's dict of `prompt` or
                `prompt_token_ids`.

        Raises:
            SpecError: another form, a prompt that is empty or too long, or a text without a
                tokenizer.
        """
        return self.prompts.ids(prompt)

    def activations(
        self,
        prompt: Any,
        *,
        layers: LayersLike | None = None,
        sites: SitesLike = "resid_post",
        positions: PositionsLike = "prompt",
    ) -> dict[Tap, Tensor]:
        """Return activations; the arguments and the result are those of `gradients`."""
        tokens, taps, places = self._select(prompt, layers, sites, positions)
        by_tap: dict[Tap, Tensor] = {}
        plain_pass(self.hooked, tokens, taps, partial(_keep, by_tap, places))
        return {tap: by_tap[tap] for tap in taps}

    def gradients(
        self,
        prompt: Any,
        metric: Any,
        *,
        layers: LayersLike | None = None,
        sites: SitesLike = "resid_post",
        positions: PositionsLike = "prompt",
    ) -> dict[Tap, Tensor]:
        """Return the gradient of a metric with respect to activations.

        It takes one forward and one backward pass, for any number of sites and layers. A gradient
        is the direction in which the metric grows fastest; it can be the vector of a `Steer`.

        Args:
            prompt: see `tokens`.
            metric: a `LogProb` or `LogitDiff` of `midstream.lab.sweep`, of the token after the
                prompt; or a function of the logits, float32 [tokens, vocabulary], that returns a
                tensor of one number.
            layers: as in `Capture`; omitted: all.
            sites: as in `Capture`.
            positions: positions in the prompt, as in `Capture`.

        Returns:
            By (site, layer): float32 [positions, width] on the CPU, positions ascending.

        Raises:
            SpecError: an argument is malformed, or the model lacks a layer or a site.
        """
        tokens, taps, places = self._select(prompt, layers, sites, positions)
        known = read_with_ids(metric, self.prompts.id_of, self.hooked.vocabulary)
        function = logit_function(known)
        by_tap: dict[Tap, Tensor] = {}
        gradient_pass(self.hooked, tokens, function, taps, gradients=partial(_keep, by_tap, places))
        return {tap: by_tap[tap] for tap in taps}

    def find_taps(self, layers: object, sites: object) -> tuple[Tap, ...]:
        """Return the selected (site, layer), in the order of a forward pass.

        Args:
            layers: any form of Layers; None: all, or those in the names of sites.
            sites: any form of Sites.

        Raises:
            SpecError: either is malformed, or the model lacks a layer or a site.
        """
        chosen, named = read_taps(layers, sites, "layers", "sites")
        return find_taps(
            chosen or Layers("all"), named or Sites("resid_post"), self.shape, "layers", "sites"
        )

    def _select(
        self, prompt: object, layers: object, sites: object, positions: object
    ) -> tuple[list[int], tuple[Tap, ...], list[int]]:
        """Return the prompt's token ids, the taps and the positions."""
        with at("prompt"):
            tokens = self.prompts.ids(prompt)
        return tokens, self.find_taps(layers, sites), self.prompts.select(positions, tokens)

    def __repr__(self) -> str:
        weight = next(self.hooked.model.parameters())
        dtype = str(weight.dtype).removeprefix("torch.")
        return f"Twin({self.model}, {dtype} on {weight.device})"


def _keep(by_tap: dict[Tap, Tensor], places: list[int], tap: Tap, rows: Tensor) -> None:
    """Add rows at some positions to what was found, float32 on the CPU."""
    by_tap[tap] = rows[places].float().cpu()


def _shape_of(hooked: HookedModel) -> ModelShape:
    """Return the dimensions of a model, with the sites where gradients exist."""
    count = len(hooked.layers)
    reasons: dict[Tap, str] = {(site, layer % count): _NO_END for site, layer in ENDS.items()}
    widths: dict[Tap, int] = {}
    heads: dict[Tap, int] = {}
    taps = []
    for tap in ((site, layer) for layer in range(count) for site in IN_LAYERS):
        problem = hooked.missing(tap) or (_FIXED if hooked.is_fixed(tap) else None)
        if problem is not None:
            reasons[tap] = problem
            continue
        taps.append(tap)
        if tap[0] in INNER:
            widths[tap] = hooked.inner.places[tap[1]].found[tap[0]].width
        if hooked.heads(tap):
            heads[tap] = hooked.heads(tap)
    dtype = str(next(hooked.model.parameters()).dtype).removeprefix("torch.")
    return ModelShape(
        count,
        hooked.width,
        taps,
        tuple(reasons.items()),
        dtype,
        tuple(widths.items()),
        tuple(heads.items()),
    )
