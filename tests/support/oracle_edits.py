"""The reference for edits: transformers in float32 with plain hooks, formulas in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from midstream import Gate, Local
from midstream.results.local_info import LocalInfo
from midstream.sites import Tap
from support.formulas import apply, read_score
from support.gate_memory import amounts

EVERY_SITE = (
    "resid_pre", "attn_in", "attn_out", "resid_mid", "mlp_in", "mlp_out", "resid_post"
)  # fmt: skip
BRANCHES = ("attn_in", "attn_out", "mlp_in", "mlp_out")


@dataclass(frozen=True)
class Places:
    """Where transformers has a layer's sites, if it has: a module's input is named "> module"."""

    layers: str
    attn_out: str | None
    resid_mid: str | None
    mlp_in: str | None
    mlp_out: str | None
    attn_in: str | None = ">self_attn"
    resid_pre: str = ">"
    resid_post: str = ""


PLACES = {
    "llama": Places("model.layers", "self_attn", ">post_attention_layernorm", ">mlp", "mlp"),
    "gemma3": Places(
        "model.layers", "post_attention_layernorm", ">pre_feedforward_layernorm", ">mlp",
        "post_feedforward_layernorm",
    ),
    "mixtral": Places("model.layers", "self_attn", ">post_attention_layernorm", ">mlp", "mlp"),
    "gpt2": Places("transformer.h", "attn", ">ln_2", ">mlp", "mlp", attn_in=">attn"),
}  # fmt: skip


@dataclass(frozen=True)
class At:
    """An edit by value, and the positions at which it applies."""

    edit: Any
    where: Callable[[int], bool] = lambda position: True


@dataclass(frozen=True)
class Seen:
    """One forward over a whole request."""

    logits: Tensor  # [T, V]
    values: dict[Tap, Tensor]  # [T, H] of each tap, with the edits there in it
    before: dict[Tap, Tensor]  # the same without the edits there, of taps that are edited

    def effect(self, tap: Tap) -> float:
        """How far the edits of a tap moved what was there, at most, by row."""
        return row_error(self.values[tap], self.before[tap])

    def touched(self, tap: Tap) -> int:
        """How many rows the edits of a tap changed."""
        return int((self.values[tap] != self.before[tap]).any(dim=-1).sum())


class EditOracle:
    """Any edits, at any of the sites, without a KV cache."""

    def __init__(
        self, path: Path, places: Places, device: str = "cpu", dtype: torch.dtype = torch.float32
    ):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
        self.model = model.eval().to(device)
        layers = reduce(getattr, places.layers.split("."), self.model)
        self.num_layers = len(layers)
        self.width = int(self.model.config.hidden_size)
        self._edits: Sequence[At] = ()
        self._tokens: list[int] = []
        self._seen = Seen(torch.empty(0), {}, {})
        for index, layer in enumerate(layers):
            for site in EVERY_SITE:
                if (place := getattr(places, site)) is not None:
                    self._hook(layer, place, (site, index))

    @torch.no_grad()
    def run(self, tokens: Sequence[int], edits: Sequence[At] = ()) -> Seen:
        """One forward over all the tokens, the edits of one tap in the order given."""
        self._edits = edits
        self._tokens = list(tokens)
        self._seen = Seen(torch.empty(0), {}, {})
        ids = torch.tensor([list(tokens)], device=self.model.device)
        logits = self.model(ids, use_cache=False).logits[0]
        self._edits = ()
        return Seen(logits.float().cpu(), self._seen.values, self._seen.before)

    def generate(self, prompt: Sequence[int], count: int, edits: Sequence[At] = ()) -> list[int]:
        """Greedy tokens, the whole sequence computed anew for each."""
        found = list(prompt)
        for _ in range(count):
            found.append(int(self.run(found, edits).logits[-1].argmax()))
        return found[len(prompt) :]

    def _hook(self, layer: nn.Module, place: str, tap: Tap) -> None:
        module = layer.get_submodule(place.removeprefix(">"))
        if place.startswith(">"):

            def before(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
                if args:
                    return (self._edited(tap, args[0]), *args[1:]), kwargs
                return args, {**kwargs, "hidden_states": self._edited(tap, kwargs["hidden_states"])}

            module.register_forward_pre_hook(before, with_kwargs=True)
        else:

            def after(_module: nn.Module, _args: tuple, out: Any) -> Any:
                if isinstance(out, tuple):
                    return (self._edited(tap, out[0]), *out[1:])
                return self._edited(tap, out)

            module.register_forward_hook(after)

    def _edited(self, tap: Tap, hidden: Tensor) -> Tensor:
        """A copy of a branch, which other modules may read as well; the stream itself, as what the
        layer keeps for its skip connection is the same tensor.
        """
        if tap[0] in BRANCHES:
            hidden = hidden.clone(memory_format=torch.contiguous_format)
        self._reach(tap, hidden)
        return hidden

    def _reach(self, tap: Tap, hidden: Tensor) -> None:
        """Edits in place."""
        rows = hidden.view(-1, hidden.shape[-1])
        mine = [one for one in self._edits if tap in self.taps(one.edit)]
        if mine:
            self._seen.before[tap] = rows.cpu().clone()
            h = rows.double().cpu().numpy()
            for one in mine:
                h = self._apply(one, tap, h)
            rows.copy_(torch.from_numpy(h))
        self._seen.values[tap] = rows.cpu().clone()

    def _apply(self, one: At, tap: Tap, h: np.ndarray) -> np.ndarray:
        chosen = [position for position in range(len(h)) if one.where(position)]
        if not chosen:
            return h
        edit = one.edit
        if isinstance(edit, Local):
            out = h.copy()
            given = torch.from_numpy(h[chosen]).float()
            ids = torch.tensor([self._tokens[position] for position in chosen])
            info = LocalInfo("oracle", *tap, torch.tensor(chosen), ids)
            made = edit.function.fn(given, info)
            out[chosen] = h[chosen] if made is None else made.double().numpy()
            return out
        score = None
        if isinstance(edit, Gate) and edit.probe.tap is not None:
            site, layer = edit.probe.tap
            read = (site, layer % self.num_layers)
            if read != tap:
                score = read_score(edit.probe, self._seen.values[read].double().numpy())[chosen]
        if isinstance(edit, Gate) and edit.memory:
            edit, score = self._opened(edit, tap, chosen)
        inner = edit.edit if isinstance(edit, Gate) else edit
        several = len(getattr(inner, "rows", ())) > 1
        out = h.copy()
        out[chosen] = apply(edit, h[chosen], score, listed_rows(edit, chosen) if several else None)
        return out

    def _opened(self, gate: Gate, tap: Tap, chosen: Sequence[int]) -> tuple[Gate, np.ndarray]:
        """A gate without memory, and scores for it, that does at some positions what one with
        memory does: it reads what enters its tap, before all edits there.
        """
        place = gate.probe.tap
        read = tap if place is None else (place[0], place[1] % self.num_layers)
        entered = self._seen.before.get(read, self._seen.values.get(read))
        assert entered is not None
        h = entered.double().numpy()[chosen]
        if gate.probe.head is not None:
            size = gate.probe.direction.size
            h = h[:, gate.probe.head * size : (gate.probe.head + 1) * size]
        open_to = np.array(amounts(gate, read_score(gate.probe, h)))
        if gate.sharpness is None:
            return Gate(gate.edit, gate.probe, 0.5), open_to
        return Gate(gate.edit, gate.probe, 0.0, 1.0), np.log(open_to / (1 - open_to))

    def taps(self, edit: Any) -> set[Tap]:
        """Where an edit is."""
        indices = edit.layers.indices
        layers = range(self.num_layers) if indices == "all" else indices
        return {(site, layer % self.num_layers) for layer in layers for site in edit.sites}

    def scores(self, probe: Any, seen: Seen) -> np.ndarray:
        """What a probe reads of every token, float64 [T]."""
        tap = (probe.sites.names[0], probe.layers.indices[0] % self.num_layers)
        return read_score(probe, seen.values[tap].double().numpy())


def listed_rows(edit: Any, chosen: Sequence[int]) -> list[int]:
    """Which row each position gets: that of its place in the list, where positions are listed by
    number, else that of its place among them.
    """
    listed = list(edit.positions.include)
    if len(listed) > 1 and all(isinstance(one, int) and one >= 0 for one in listed):
        return [listed.index(position) for position in chosen]
    return list(range(len(chosen)))


def row_error(found: Tensor, expected: Tensor) -> float:
    """The largest ‖found − expected‖ of a row, by that row's length: a model's few huge rows hide
    nothing of the others. Rows far shorter than most are measured by a tenth of their median.
    """
    assert found.shape == expected.shape, f"{tuple(found.shape)} against {tuple(expected.shape)}"
    a, b = found.double(), expected.double()
    lengths = b.norm(dim=-1)
    floor = max(1e-6, 0.1 * float(lengths.median()))
    return float(((a - b).norm(dim=-1) / lengths.clamp_min(floor)).max())
