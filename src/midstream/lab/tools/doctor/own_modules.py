"""Reference that needs no second implementation: vLLM's own modules, with plain PyTorch hooks.

The engine keeps the model without taps beside the tapped one, with the same weights, and runs it
for requests without a plan. Sites are found by what the modules take and give and by sums, as in
transformers' models, not by midstream's table of layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from midstream.lab.attribution.hooked.inner_hooks import removing
from midstream.lab.tools.doctor.compare import row_error
from midstream.lab.tools.doctor.module_hooks import (
    BOTH,
    FIRST,
    SECOND,
    Halves,
    HookedModules,
    NoOwnModules,
    stream,
)

# Names of a layer's attention, or of what it has in its place, and of its MLP.
ATTENTION = (
    "self_attn", "self_attention", "attn", "attention", "linear_attn", "short_conv", "conv",
    "mamba", "mixer", "temporal_block",
)  # fmt: skip
MLPS = ("mlp", "feed_forward", "block_sparse_moe", "moe", "ffn", "ff")
# Sums of the same numbers, in the dtype of the rows; and how much of a shift's effect may be left.
_SUMS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_LEFT = 0.25


class ChildCall(NamedTuple):
    """One call of a layer's child; copies of the rows [T, H] that it took and gave."""

    name: str
    taken: list[Tensor]
    given: list[Tensor]


class OwnModules(HookedModules):
    """vLLM's model without taps, as a reference like `Reference`."""

    name = "vLLM's own modules"

    def find_sites(self, tokens: Sequence[int]) -> None:
        """Find the sites, in plain requests and in ones that shift the halves at layers' exits.

        Raises:
            NoOwnModules: the engine keeps no model without taps, or runs in another process.
        """
        calls: dict[int, list[ChildCall]] = defaultdict(list)
        with removing(self._call_hooks(calls)):
            plain = self.run(tokens).logits[-1]
        taken, given = dict(self._taken), dict(self._given)
        for index in range(len(self.layers)):
            halves = self._find_halves(tokens, plain, index)
            if halves is not None:
                self._halves[index, True] = halves
            before = self._halves.get((index - 1, True))
            entry = FIRST if len(taken[index]) == 1 else before
            if entry is not None and len(taken[index]) <= 2:
                self._halves[index, False] = entry
            names = find_inputs(calls[index])
            if entry is not None and halves is not None:
                pre, post = stream(taken[index], entry), stream(given[index], halves)
                if pre.dim() == 2:  # one stream
                    names = find_branches(calls[index], pre, post)
            if reads_with_others(calls[index], index in self._visited):
                giver = find_giver(calls[index])
                if giver is None:
                    names.pop("mlp_in", None)
                else:
                    self._givers["mlp_in", index] = giver
            for site, name in names.items():
                self._children[site, index] = name
        self._find_ends(tokens)
        self._check_apart(tokens)

    def _find_halves(self, tokens: Sequence[int], plain: Tensor, index: int) -> Halves | None:
        """Return how the halves at a layer's exit make the stream: shifts of what does not count,
        or from one half to the other of a sum, leave the logits.
        """
        if len(self._given[index]) == 1:
            return FIRST
        if len(self._given[index]) != 2:
            return None
        size = self._given[index][0].float().norm(dim=-1).median() / self._width**0.5
        shift = size * torch.randn(self._width, generator=torch.Generator().manual_seed(index))

        def effect(first: int, second: int) -> float:
            def move(_module: nn.Module, _args: Any, out: Any) -> None:
                for factor, half in zip((first, second), self._tensors(out), strict=True):
                    half += factor * shift.to(half)

            with removing([self.layers[index].register_forward_hook(move)]):
                return float((self.run(tokens).logits[-1] - plain).norm())

        if effect(0, 1) == 0:
            return FIRST
        alone = effect(1, 0)
        if alone == 0:
            return SECOND
        return BOTH if effect(1, -1) <= _LEFT * alone else None

    def _find_ends(self, tokens: Sequence[int]) -> None:
        """Find the embedding and the final norm, where the trunk gives on what they give."""
        outputs: dict[nn.Module, Tensor] = {}

        def see(module: nn.Module, _args: Any, out: Any) -> None:
            for rows in self._tensors(out)[:1]:
                outputs.setdefault(module, rows.cpu().float().clone())

        kinds = [(module, type(module).__name__) for module in self._model.modules()]
        tables = [module for module, kind in kinds if kind == "VocabParallelEmbedding"]
        norms = [module for module, kind in kinds if "norm" in kind.lower()]
        watched = [self._model, *tables, *norms]
        with removing([module.register_forward_hook(see) for module in watched]):
            first = self.run(tokens).values.get(("resid_pre", 0))
        for table in tables:
            if first is not None and table in outputs and torch.equal(outputs[table], first):
                self._ends["embed"] = table
        given = outputs.get(self._model)
        if given is not None and any(
            norm in outputs and torch.equal(outputs[norm], given) for norm in norms
        ):
            self._ends["final_norm"] = self._model

    def _check_apart(self, tokens: Sequence[int]) -> None:
        """Check that captures run other modules than these."""
        from midstream import Capture

        self._request(tokens, 1, capture=[Capture(layers=0, sites="resid_post")])
        if self._given:
            raise NoOwnModules("the engine keeps no model without taps beside the tapped one")

    def _call_hooks(self, calls: dict[int, list[ChildCall]]) -> list[Any]:
        """Register hooks that record what the layers' children take and give."""
        return [
            handle
            for index, layer in enumerate(self.layers)
            for name, child in layer.named_children()
            for handle in self._child_hooks(calls[index], name, child)
        ]

    def _child_hooks(self, calls: list[ChildCall], name: str, child: nn.Module) -> list[Any]:
        taken: list[Tensor] = []

        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            taken[:] = [part.cpu().clone() for part in self._tensors([*args, *kwargs.values()])]

        def leave(_module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            given = [part.cpu().clone() for part in self._results(args, kwargs, out)]
            calls.append(ChildCall(name, list(taken), given))

        return [
            child.register_forward_pre_hook(enter, with_kwargs=True),
            child.register_forward_hook(leave, with_kwargs=True),
        ]


def find_inputs(calls: Sequence[ChildCall]) -> dict[str, str]:
    """Return the children of a layer that take the inputs of attention and MLP, by site."""
    places = {"attn_in": _first_of(calls, ATTENTION), "mlp_in": _first_of(calls, MLPS)}
    takers = {site: calls[place] for site, place in places.items() if place < len(calls)}
    return {site: call.name for site, call in takers.items() if call.taken}


def _first_of(calls: Sequence[ChildCall], names: Sequence[str]) -> int:
    return next((i for i, call in enumerate(calls) if call.name in names), len(calls))


def reads_with_others(calls: Sequence[ChildCall], is_visited: bool) -> bool:
    """Return whether modules other than attention read the MLP's input too, as shared experts do.

    Args:
        is_visited: the layer is called with modules, which are none of its children.
    """
    place = _first_of(calls, MLPS)
    if place == len(calls) or not calls[place].taken:
        return False
    rows = calls[place].taken[0]
    others = [
        call.name
        for call in (*calls[:place], *calls[place + 1 :])
        if any(torch.equal(part, rows) for part in call.taken)
    ]
    return (is_visited or bool(others)) and not set(others) & set(ATTENTION)


def find_giver(calls: Sequence[ChildCall]) -> str | None:
    """Return the child that gives the MLP's input; None if no child does."""
    place = _first_of(calls, MLPS)
    rows = calls[place].taken[0]
    givers = [
        call.name for call in calls[:place] if call.given and torch.equal(call.given[0], rows)
    ]
    return givers[-1] if givers else None


def find_branches(calls: Sequence[ChildCall], pre: Tensor, post: Tensor) -> dict[str, str]:
    """Return the children of a layer that take and give its branches, by site: those by their names
    and by the sums that the layer goes on with. `resid_mid` is the child that takes both halves of
    the sum, or the one whose output is added.

    Args:
        calls: of the children, in order.
        pre, post: the stream at the layer's entry and exit, [T, H].
    """
    limit, nowhere = _SUMS[pre.dtype], len(calls)
    attention, mlp = (_first_of(calls, names) for names in (ATTENTION, MLPS))
    branches = find_inputs(calls)

    def outputs(start: int, other: int) -> list[tuple[int, Tensor]]:
        end = other if start < other else nowhere
        return [(i, calls[i].given[0]) for i in range(start, end) if calls[i].given]

    middle = pre if attention == nowhere else None
    for i, branch in outputs(attention, mlp) if attention < nowhere else ():
        later = [rows for call in calls[i + 1 :] for rows in _streams_of(call)]
        if any(row_error(rows, pre + branch) <= limit for rows in [*later, post]):
            middle = pre + branch
            branches["attn_out"] = calls[i].name
            if mlp < nowhere:
                sums = (
                    call.name
                    for call in calls[i + 1 :]
                    if len(call.taken) == 2
                    and row_error(call.taken[0] + call.taken[1], middle) <= limit
                )
                branches["resid_mid"] = next(sums, calls[i].name)
            break
    for i, branch in outputs(mlp, attention) if mlp < nowhere else ():
        if middle is not None and row_error(middle + branch, post) <= limit:
            branches["mlp_out"] = calls[i].name
        elif middle is None:
            for j, other in outputs(attention, mlp):
                # Attention and the MLP side by side.
                if row_error(pre + other + branch, post) <= limit:
                    branches |= {"mlp_out": calls[i].name, "attn_out": calls[j].name}
    return branches


def _streams_of(call: ChildCall) -> list[Tensor]:
    """Return what of a call may be the stream."""
    sums = [call.taken[0] + call.taken[1]] if len(call.taken) == 2 else []
    return [*sums, *call.taken, *call.given]
