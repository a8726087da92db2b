"""Reference model: transformers in float32 with plain hooks, with and without edits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from midstream.lab.attribution.hooked.end_hooks import COMPARED
from midstream.lab.attribution.hooked.model import HookedModel
from midstream.sites import ENDS, OUTER, Tap

# An edit as a function of the activations at its tap, [T, H], in any float dtype.
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ForwardPass:
    """Results of one forward pass over all tokens of a request.

    Attributes:
        logits: float32 [T, V].
        values: float32 [T, H] by tap, after the edits at that tap.
        before: float32 [T, H] by edited tap, before the edits at that tap.
    """

    logits: Tensor
    values: dict[Tap, Tensor]
    before: dict[Tap, Tensor]


class Reference(HookedModel):
    """A transformers model in float32, run without a KV cache."""

    name = "transformers"

    def __init__(self, folder: str | Path, is_whole: bool = False) -> None:
        """Load the model: the language model, or the whole of a multimodal one."""
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        loader = AutoModelForImageTextToText if is_whole else AutoModelForCausalLM
        settings = {"dtype": torch.float32, "attn_implementation": "eager"}
        super().__init__(loader.from_pretrained(folder, **settings))
        self.image_prompts: list[list[int]] = []
        self._images: list[dict[str, Any]] = []
        self._requests: list[dict[str, Any]] = []

    def add_image(self, folder: str | Path, text: str, picture: Any) -> None:
        """Add a prompt with an image, by the processor in the model's folder."""
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(folder)
        inputs = dict(processor(text=[text], images=[[picture]], return_tensors="pt"))
        inputs.pop("labels", None)
        self.image_prompts.append(inputs.pop("input_ids")[0].tolist())
        self._images.append(inputs)
        self._requests.append({"prompt": text, "multi_modal_data": {"image": picture}})

    @torch.no_grad()
    def find_sites(self, tokens: Sequence[int]) -> None:
        """Find all sites, those without a layer too, in four plain passes over `tokens`."""
        super().find_sites(tokens)
        self.ends.find(tokens)

    def request(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Return the engine's prompt for token ids."""
        if prompt in self.image_prompts:
            return self._requests[self.image_prompts.index(list(prompt))]
        return {"prompt_token_ids": list(prompt)}

    def _inputs(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the inputs for token ids, with the image of the prompt that they begin with."""
        ids = self.ids(tokens)
        for prompt, image in zip(self.image_prompts, self._images, strict=True):
            if list(tokens[: len(prompt)]) != prompt:
                continue
            inputs = {**image, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
            for name in inputs.keys() & {"token_type_ids", "mm_token_type_ids"}:
                # By the first, tokens of an image attend both ways, which they do not in vLLM on a
                # CPU.
                types = torch.zeros_like(ids)
                if name.startswith("mm_"):
                    types[:, : len(prompt)] = inputs[name]
                inputs[name] = types
            return inputs
        return {"input_ids": ids}

    @torch.no_grad()
    def run(
        self, tokens: Sequence[int], changes: Mapping[Tap, Change] | None = None
    ) -> ForwardPass:
        """Run one forward pass.

        Args:
            changes: edits by tap.
        """
        forward = ForwardPass(torch.empty(0), {}, {})
        records = {tap: partial(_record, forward, changes or {}, tap) for tap in self._taps()}
        with self.recording(records):
            logits = self.model(**self._inputs(tokens), use_cache=False).logits[0]
        if any(list(tokens[: len(prompt)]) == prompt for prompt in self.image_prompts):
            # The table's rows are not those of the image, which take their places later.
            forward.values.pop(("embed", 0), None)
        return ForwardPass(logits.float(), forward.values, forward.before)

    def generate(
        self, prompt: Sequence[int], count: int, changes: Mapping[Tap, Change] | None = None
    ) -> tuple[list[int], ForwardPass]:
        """Generate greedily, with the whole request recomputed for each token.

        Args:
            count: number of tokens to generate, at least 1.
            changes: edits by tap.

        Returns:
            (generated token ids, the last forward pass, which covers all but the last of them).
        """
        tokens = list(prompt)
        for _ in range(count):
            forward = self.run(tokens, changes)
            tokens.append(int(forward.logits[-1].argmax()))
        return tokens[len(prompt) :], forward

    def _taps(self) -> list[Tap]:
        """Return all taps that were found."""
        count = len(self.layers)
        inner = [
            (site, layer) for layer, places in enumerate(self.inner.places) for site in places.found
        ]
        ends = [(site, layer % count) for site, layer in ENDS.items() if site in COMPARED]
        outer = [(site, layer) for site in OUTER for layer in range(count)]
        return [tap for tap in [*outer, *ends] if self.missing(tap) is None] + inner


def _record(
    forward: ForwardPass, changes: Mapping[Tap, Change], tap: Tap, rows: Tensor
) -> Tensor | None:
    """Record the rows at a tap; return what an edit makes of them, or None without one."""
    change = changes.get(tap)
    if change is None:
        forward.values[tap] = rows.clone()
        return None
    forward.before[tap] = rows.clone()
    forward.values[tap] = change(rows).to(rows.dtype)
    return forward.values[tap]
