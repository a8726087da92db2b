"""One request for each operation at sites inside attention and the MLP: whole vectors and heads."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers as hf

from midstream import Capture, Gate, Probe, Route
from midstream.plan import Reading
from midstream.sites import BY_NAME, Tap
from support import tiny
from support.edit_cases import Case, Made, Maker, of_each_kind, of_one_tap
from support.inner_oracle import InnerOracle
from support.oracle_edits import At, Seen

# More heads than the other tiny models have, and a width of all heads that is not the model's.
_HEADS = {**tiny._COMMON, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
HEADS = tiny.Tiny(lambda: hf.LlamaConfig(**_HEADS))
TWO_LAYERS = tiny.Tiny(lambda: hf.LlamaConfig(**{**_HEADS, "num_hidden_layers": 2}))
SPECS = {
    **tiny.MODELS, "llama": HEADS, "llama of two layers": TWO_LAYERS, "qwen3_moe": tiny.QWEN3_MOE,
}  # fmt: skip
END = "resid_post"


class InnerMaker(Maker):
    """Edits of some heads of a tap, or of its whole vectors, sized by what is there."""

    def __init__(
        self, tap: Tap, heads: tuple[int, ...], head_dim: int, plain: Seen, draw: torch.Generator
    ) -> None:
        super().__init__(tap, plain, draw)
        self.heads = heads
        if heads:
            self.h = self.h[:, heads[0] * head_dim : (heads[0] + 1) * head_dim]
            self.size = float(self.h.norm(dim=-1).median())
            self.place |= {"head": heads[0] if len(heads) == 1 else list(heads)}
        self.where = f"{self.site} {list(heads)} of layer {self.layer}"
        self.takes_maps = not heads and self.h.shape[1] <= plain.values[END, 0].shape[1]

    def leaves_some(self, edit: Any) -> bool:
        # Each of several heads may leave other tokens alone.
        return len(self.heads) < 2 or isinstance(edit, Gate)

    def gate(self, edit: Any, tap: Tap | None = None, soft: bool = False) -> Gate:
        """Around edits of one head it reads that head's vector, else whole ones."""
        if tap is None and len(self.heads) == 1:
            found = super().gate(edit, None, soft)
            reading = Reading(found.probe.direction, found.probe.bias, head=self.heads[0])
            return Gate(edit, reading, found.threshold, found.sharpness)
        read = tap or (self.site, self.layer)
        found = super().gate(edit, read, soft)
        reading = found.probe if tap else found.probe.at_tap(found.probe.direction, None)
        return Gate(edit, reading, found.threshold, found.sharpness)

    def routes(self) -> Iterator[tuple[str, Route, bool]]:
        """Choices of the experts of a router with four, which chooses two; and whether they leave
        some tokens alone.
        """
        at = {"layer": self.layer}
        yield "route, activate", Route(1, **at), False
        yield "route, activate all", Route([0, 3], **at), False
        yield "route, deactivate", Route(None, [0, 2], **at), False
        yield "route, bias", Route(bias={0: 2 * self.size, 2: -0.5 * self.size}, **at), False
        both = Route(3, 1, {0: self.size, 3: 0.5 * self.size}, **at)
        yield "route, all three", both, False
        yield "route, gated", self.gate(both), True
        yield "route, gated elsewhere", self.gate(both, (END, 0)), True
        soft = Route(bias={1: self.size}, **at)
        yield "route, soft gate", self.gate(soft, soft=True), False

    def probes(self) -> list[Probe]:
        here: dict[str, Any] = {"bias": 0.5, "site": self.site, "name": "here"}
        if self.heads:
            here["head"] = self.heads[-1]
        end = torch.randn(self.plain.values[END, 0].shape[1], generator=self.draw)
        return [
            Probe(self.direction(), self.layer, **here),
            Probe(end, -1, name="end", positions="generated"),
        ]


def earlier(oracle: InnerOracle, tap: Tap) -> list[Tap]:
    """An earlier site of the same layer, of another width where there is one, and of the one
    before.
    """
    site, layer = tap
    before = [name for name in oracle.sites if BY_NAME[name].order < BY_NAME[site].order]
    found = [(before[len(before) // 2], layer)] if before else []
    return [*found, (END, layer - 1), (oracle.sites[-1], layer - 1)] if layer else found


def head_choices(oracle: InnerOracle, site: str) -> list[tuple[int, ...]]:
    """No heads; the last one; and several, if there are: not side by side, where that can be."""
    count = oracle.heads(site)
    found: list[tuple[int, ...]] = [()]
    if count:
        found.append((count - 1,))
    if count > 1:
        found.append((0, 2) if count > 2 else (0, 1))
    return found


def cases(
    oracle: InnerOracle,
    prompts: Sequence[list[int]],
    layers: Callable[[int], int],
    every: int = 1,
    each_kind: bool = False,
) -> list[Case]:
    """Each operation at each inner site, of each choice of heads; of these every so-many-th, or of
    each kind every so-many-th and at least one.
    """
    draw = torch.Generator().manual_seed(23)
    plain = [oracle.run(prompt) for prompt in prompts]
    found: list[Made] = []
    routes: list[Case] = []
    number = 0
    for nth_site, site in enumerate(oracle.sites):
        tap = (site, layers(nth_site))
        for heads in head_choices(oracle, site):
            for nth, (prompt, seen) in enumerate(zip(prompts, plain, strict=True)):
                phase = ("all", "prompt", "generated")[(number + nth) % 3]
                maker = InnerMaker(tap, heads, oracle.head_dim, seen, draw)
                mine = of_one_tap(maker, prompt, phase, earlier(oracle, tap))
                found += list(mine)[nth :: len(prompts)]
                if site == "router":
                    routes += list(_of_experts(maker, prompt))[nth :: len(prompts)]
            number += 1
    chosen = of_each_kind(found, every) if each_kind else found[::every]
    return [made.case() for made in chosen] + routes


def _of_experts(maker: InnerMaker, prompt: list[int]) -> Iterator[Case]:
    tap = (maker.site, maker.layer)
    for name, edit, some in maker.routes():
        yield Case(f"{name} of layer {tap[1]}", prompt, [At(edit)], maker.probes(), tap, some)


def with_neighbours(given: Sequence[Case], prompts: Sequence[list[int]]) -> list[Case]:
    """The cases, and between them requests of the same prompts that are edited nowhere."""
    found = []
    for nth, case in enumerate(given):
        if nth % 12 == 0:
            prompt = prompts[nth // 12 % len(prompts)]
            found.append(Case(f"neighbour {nth // 12}", prompt, []))
        found.append(case)
    return found


def captured(oracle: InnerOracle, case: Case) -> list[Capture]:
    """The edited layer's inner sites, and the ends of all layers: what is downstream."""
    layer = oracle.num_layers - 1 if case.tap is None else case.tap[1]
    return [Capture(layer, oracle.sites), Capture("all", END)]


def fresh(seed: int, count: int) -> list[int]:
    """A prompt of its own for each seed."""
    draw = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, tiny.VOCAB, (count,), generator=draw).tolist()
