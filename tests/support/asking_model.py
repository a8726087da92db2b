"""A tiny model with a chat template, and transformers with hooks that place rows in it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from support.tokenizers import byte_level

LAYERS, HIDDEN = 4, 64
# One token each; two of the last are one token too.
TOKENS = (" ?", " #", "@", "@@")


def make(folder: Path) -> Path:
    """Saves the model, with weights large enough that every layer matters."""
    tokenizer = byte_level()
    tokenizer.add_tokens(list(TOKENS))
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=96,
        num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Hooked:
    """transformers' model in float32, with plain hooks on its layers' outputs."""

    def __init__(self, path: Path, weights: Path | None = None) -> None:
        made = hf.AutoModelForCausalLM.from_pretrained(weights or path, dtype=torch.float32)
        self.model: Any = made.eval()
        self.tokenizer: Any = hf.AutoTokenizer.from_pretrained(path)

    def prompt(self, content: str) -> list[int]:
        """The tokens of a chat of one message."""
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @torch.no_grad()
    def rows(self, ids: Sequence[int], layer: int) -> torch.Tensor:
        """The residual stream after a layer, [tokens, width]."""
        seen: list[torch.Tensor] = []
        self._run(ids, layer, lambda h: seen.append(h.clone()))
        return seen[0]

    @torch.no_grad()
    def answer(
        self, ids: Sequence[int], layer: int, place: Callable[[torch.Tensor], None], count: int
    ) -> tuple[list[int], list[float]]:
        """The greedy tokens with `place` called with the stream after a layer, and their log
        probabilities; no KV cache.
        """
        tokens, found = list(ids), []
        for _ in range(count):
            scores = self._run(tokens, layer, place)[-1].log_softmax(-1)
            tokens.append(int(scores.argmax()))
            found.append(float(scores.max()))
        return tokens[len(ids) :], found

    def _run(
        self, ids: Sequence[int], layer: int, hook: Callable[[torch.Tensor], Any]
    ) -> torch.Tensor:
        def call(_: Any, __: Any, output: Any) -> None:
            hook((output[0] if isinstance(output, tuple) else output).view(-1, HIDDEN))

        handle = self.model.model.layers[layer].register_forward_hook(call)
        try:
            logits: torch.Tensor = self.model(torch.tensor([list(ids)])).logits[0]
            return logits
        finally:
            handle.remove()


def placing(
    rows: torch.Tensor, first: int, mode: str = "add", norm: str | None = "match"
) -> Callable[[torch.Tensor], None]:
    """What puts rows at the positions from `first` on, by the formulas of the documents."""

    def place(h: torch.Tensor) -> None:
        for index, row in enumerate(rows.float()):
            old = h[first + index].clone()
            new = row if norm is None else row / row.norm() * old.norm()
            h[first + index] = old + new if mode == "add" else new

    return place
