"""Reference that needs no second implementation: vLLM's own modules, with plain PyTorch hooks.

The engine keeps the model without taps beside the tapped one, with the same weights, and runs it
for requests without a plan. Sites are found by what the modules take and give and by sums, as in
transformers' models, not by midstream's table of layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from midstream.lab.tools.doctor.compare import row_error
from midstream.lab.tools.doctor.engine import sampling
from midstream.lab.tools.doctor.reference import Change, ForwardPass
from midstream.sites import ENDS, OUTER, Tap

# Names of a layer's attention, or of what it has in its place, and of its MLP.
ATTENTION = (
    "self_attn", "self_attention", "attn", "attention", "linear_attn", "short_conv", "conv",
    "mamba", "mixer", "temporal_block",
)  # fmt: skip
MLPS = ("mlp", "feed_forward", "block_sparse_moe", "moe", "ffn", "ff")
INNER_MISSING = "with vLLM's own modules, sites inside attention and the MLP are not compared"
# Sums of the same numbers, in the dtype of the rows; and how much of a shift's effect may be left.
_SUMS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_LEFT = 0.25
# How the halves that a layer takes and returns make the stream: the factors of both.
_FIRST, _SECOND, _BOTH = (1, 0), (0, 1), (1, 1)
_Halves = tuple[int, int]


class NoOwnModules(Exception):
    """The engine's own modules cannot be compared with."""


class _Call(NamedTuple):
    """One call of a layer's child; copies of the rows [T, H] that it took and gave."""

    name: str
    taken: list[Tensor]
    given: list[Tensor]


class OwnModules:
    """vLLM's model without taps, as a reference like `Reference`.

    Attributes:
        layers: its decoder layers.
        vocabulary: number of token ids.
    """

    name = "vLLM's own modules"

    def __init__(self, llm: Any) -> None:
        """Take the modules of an engine in this process that has not run a request with a plan."""
        self._llm = llm
        # After a plain request the runner has the model without taps.
        llm.generate([{"prompt_token_ids": [1]}], sampling(1), use_tqdm=False)
        self._model: nn.Module = llm.apply_model(lambda model: model)[0]
        text = llm.llm_engine.model_config.hf_text_config
        self.vocabulary = int(text.vocab_size)
        self._width, self.layers = llm.info.shape.hidden_size, self._find_layers()
        self._changes: Mapping[Tap, Change] = {}
        self._rows: dict[Tap, list[Tensor]] = defaultdict(list)
        self._before: dict[Tap, list[Tensor]] = defaultdict(list)
        self._logits: list[Tensor] = []
        self._taken: dict[int, list[Tensor]] = {}
        self._given: dict[int, list[Tensor]] = {}
        # Halves at the entry (False) and exit (True) of each layer, where it is known; and by
        # (site, layer) the child whose input or output the site is.
        self._halves: dict[tuple[int, bool], _Halves] = {}
        self._children: dict[Tap, str] = {}
        self._ends: dict[str, nn.Module] = {}

    def missing(self, tap: Tap) -> str | None:
        """Return why a tap is not compared; None if it is."""
        site, layer = tap
        if site in ENDS:
            return None if site in self._ends else "no module was found that gives it alone"
        if site not in OUTER:
            return INNER_MISSING
        if site in ("resid_pre", "resid_post"):
            known = (layer, site == "resid_post") in self._halves
            return None if known else "how its two halves make the stream is unknown"
        if site == "resid_mid":
            site = "attn_out" if ("resid_mid", layer) in self._children else "resid_mid"
        if (site, layer) in self._children:
            return None
        return "no module of vLLM's layer was found that takes or gives what the sums need there"

    def heads(self, tap: Tap) -> int:
        """Return 0: no tap is of single heads."""
        return 0

    def is_fixed(self, tap: Tap) -> bool:
        """Return False: each tap can be edited."""
        return False

    def run(
        self, tokens: Sequence[int], changes: Mapping[Tap, Change] | None = None
    ) -> ForwardPass:
        """Run a prompt; see `Reference.run`."""
        return self.generate(tokens, 1, changes)[1]

    def generate(
        self, prompt: Sequence[int], count: int, changes: Mapping[Tap, Change] | None = None
    ) -> tuple[list[int], ForwardPass]:
        """Generate greedily; see `Reference.generate`. Logits of earlier rows are 0."""
        self._changes = changes or {}
        tokens = self._request(prompt, count)
        if not self._given:
            raise NoOwnModules("its layers do not run in this process")
        logits = torch.cat(self._logits)
        earlier = logits.new_zeros(len(prompt) + count - 1 - len(logits), logits.shape[1])
        values = {tap: torch.cat(parts) for tap, parts in self._rows.items()}
        before = {tap: torch.cat(parts) for tap, parts in self._before.items()}
        return tokens, ForwardPass(torch.cat([earlier, logits]), values, before)

    def find_sites(self, tokens: Sequence[int]) -> None:
        """Find the sites, in plain requests and in ones that shift the halves at layers' exits.

        Raises:
            NoOwnModules: the engine keeps no model without taps, or runs in another process.
        """
        calls: dict[int, list[_Call]] = defaultdict(list)
        with self._hooked(self._call_hooks(calls)):
            plain = self.run(tokens).logits[-1]
        taken, given = dict(self._taken), dict(self._given)
        for index in range(len(self.layers)):
            halves = self._find_halves(tokens, plain, index)
            if halves is not None:
                self._halves[index, True] = halves
            before = self._halves.get((index - 1, True))
            entry = _FIRST if len(taken[index]) == 1 else before
            if entry is not None and len(taken[index]) <= 2:
                self._halves[index, False] = entry
            if entry is not None and halves is not None:
                pre, post = _stream(taken[index], entry), _stream(given[index], halves)
                self._find_branches(index, calls[index], pre, post)
        self._find_ends(tokens)
        self._check_apart(tokens)

    def _find_layers(self) -> list[nn.Module]:
        count = self._llm.info.shape.num_layers
        lists = [
            (name.count("."), list(module))
            for name, module in self._model.named_modules()
            if isinstance(module, nn.ModuleList)
            and len(module) == count
            and not any(part in name for part in ("visual", "vision", "audio"))
        ]
        if not lists:
            raise NoOwnModules(f"no module list of it has {count} layers")
        return min(lists, key=lambda candidate: candidate[0])[1]

    def _find_halves(self, tokens: Sequence[int], plain: Tensor, index: int) -> _Halves | None:
        """Return how the halves at a layer's exit make the stream: shifts of what does not count,
        or from one half to the other of a sum, leave the logits.
        """
        if len(self._given[index]) == 1:
            return _FIRST
        if len(self._given[index]) != 2:
            return None
        size = self._given[index][0].float().norm(dim=-1).median() / self._width**0.5
        shift = size * torch.randn(self._width, generator=torch.Generator().manual_seed(index))

        def effect(first: int, second: int) -> float:
            def move(_module: nn.Module, _args: Any, out: Any) -> None:
                for factor, half in zip((first, second), self._tensors(out), strict=True):
                    half += factor * shift.to(half)

            with self._hooked([self.layers[index].register_forward_hook(move)]):
                return float((self.run(tokens).logits[-1] - plain).norm())

        if effect(0, 1) == 0:
            return _FIRST
        alone = effect(1, 0)
        if alone == 0:
            return _SECOND
        return _BOTH if effect(1, -1) <= _LEFT * alone else None

    def _find_branches(self, index: int, calls: list[_Call], pre: Tensor, post: Tensor) -> None:
        """Find a layer's children that give its branches, by the sums that the layer goes on
        with.
        """
        names = [call.name for call in calls]
        attention = next((i for i, name in enumerate(names) if name in ATTENTION), None)
        mlp = next((i for i, name in enumerate(names) if name in MLPS), None)
        for site, place in (("attn_in", attention), ("mlp_in", mlp)):
            if place is not None and calls[place].taken:
                self._children[site, index] = names[place]
        limit = _SUMS[pre.dtype]
        outputs = [call.given[0] if call.given else None for call in calls]
        middle = pre if attention is None else None
        for i in range(attention or 0, len(calls) if attention is not None else 0):
            branch = outputs[i]
            if branch is None or (mlp is not None and attention < mlp <= i):
                continue
            later = [rows for call in calls[i + 1 :] for rows in _streams_of(call)] + [post]
            if any(row_error(rows, pre + branch) <= limit for rows in later):
                self._children["attn_out", index] = names[i]
                if mlp is not None:
                    self._children["resid_mid", index] = names[i]
                middle = pre + branch
                break
        for i in range(len(calls) if mlp is not None else 0):
            last = outputs[i]
            if i < mlp or last is None or (attention is not None and mlp < attention <= i):
                continue
            if middle is not None and row_error(middle + last, post) <= limit:
                self._children["mlp_out", index] = names[i]
            elif middle is None and attention is not None and outputs[attention] is not None:
                if row_error(pre + outputs[attention] + last, post) <= limit:
                    self._children["mlp_out", index] = names[i]
                    self._children["attn_out", index] = names[attention]

    def _find_ends(self, tokens: Sequence[int]) -> None:
        """Find the embedding, unless the trunk changes it, and the model's output."""
        firsts: dict[nn.Module, Tensor] = {}

        def see(module: nn.Module, _args: Any, out: Any) -> None:
            firsts.setdefault(module, self._tensors(out)[0].clone())

        tables = [
            module
            for module in self._model.modules()
            if type(module).__name__ == "VocabParallelEmbedding"
        ]
        with self._hooked([table.register_forward_hook(see) for table in tables]):
            first = self.run(tokens).values.get(("resid_pre", 0))
        for table, rows in firsts.items():
            if first is not None and row_error(rows.float(), first) == 0:
                self._ends["embed"] = table
        self._ends["final_norm"] = self._model

    def _check_apart(self, tokens: Sequence[int]) -> None:
        """Check that captures run other modules than these."""
        from midstream import Capture

        self._request(tokens, 1, capture=[Capture(layers=0, sites="resid_post")])
        if self._given:
            raise NoOwnModules("the engine keeps no model without taps beside the tapped one")

    def _request(self, prompt: Sequence[int], count: int, **plan: Any) -> list[int]:
        """Run one request with hooks; return the generated tokens."""
        for record in (self._rows, self._before, self._logits, self._taken, self._given):
            record.clear()
        with self._hooked(self._hooks()):
            output = self._llm.generate(
                [{"prompt_token_ids": list(prompt)}], sampling(count), use_tqdm=False, **plan
            )[0]
        return list(output.outputs[0].token_ids)

    @contextmanager
    def _hooked(self, handles: Sequence[Any]) -> Iterator[None]:
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _tensors(self, values: Any) -> list[Tensor]:
        """Return the rows [T, H] among arguments or results, in their order."""
        parts = list(values) if isinstance(values, (tuple, list)) else [values]
        return [
            part.view(-1, self._width)
            for part in parts
            if isinstance(part, Tensor)
            and part.is_floating_point()
            and part.dim() in (2, 3)
            and part.shape[-1] == self._width
        ]

    def _call_hooks(self, calls: dict[int, list[_Call]]) -> list[Any]:
        """Register hooks that record what the layers' children take and give."""
        handles = []
        for index, layer in enumerate(self.layers):
            for name, child in layer.named_children():
                taken: list[Tensor] = []

                def enter(_m: Any, args: Any, kwargs: Any, taken: list[Tensor] = taken) -> None:
                    rows = self._tensors([*args, *kwargs.values()])
                    taken[:] = [part.clone() for part in rows]

                def leave(
                    _m: Any, args: Any, kwargs: Any, out: Any,
                    index: int = index, name: str = name, taken: list[Tensor] = taken,
                ) -> None:  # fmt: skip
                    given = [part.clone() for part in self._results(args, kwargs, out)]
                    calls[index].append(_Call(name, list(taken), given))

                handles.append(child.register_forward_pre_hook(enter, with_kwargs=True))
                handles.append(child.register_forward_hook(leave, with_kwargs=True))
        return handles

    def _results(self, args: Any, kwargs: Any, out: Any) -> list[Tensor]:
        """Return what a module gave; some write into their last argument."""
        return self._tensors([*args, *kwargs.values()])[-1:] if out is None else self._tensors(out)

    def _hooks(self) -> list[Any]:
        """Register hooks that record and edit at every site that was found, and the logits."""
        handles = []
        for index, layer in enumerate(self.layers):
            handles.append(layer.register_forward_pre_hook(self._entry(index), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._exit(index)))
            for site in ("attn_in", "mlp_in", "attn_out", "mlp_out"):
                if (site, index) in self._children:
                    child = layer.get_submodule(self._children[site, index])
                    if site.endswith("_in"):
                        hook = self._argument((site, index))
                        handles.append(child.register_forward_pre_hook(hook, with_kwargs=True))
                    else:
                        hook = self._branch(site, index)
                        handles.append(child.register_forward_hook(hook, with_kwargs=True))
        for site, module in self._ends.items():
            tap = site, ENDS[site] % len(self.layers)
            handles.append(
                module.register_forward_hook(
                    lambda _m, _a, out, tap=tap: self._meet(tap, self._tensors(out), _FIRST)
                )
            )
        for module in self._model.modules():
            if any(base.__name__ == "LogitsProcessor" for base in type(module).__mro__):
                handles.append(
                    module.register_forward_hook(
                        lambda _m, _a, out: self._logits.append(out.cpu().float().clone())
                    )
                )
        return handles

    def _entry(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            # The tapped copy has the same hooks.
            if module is not self.layers[index]:
                return
            taken = self._tensors([*args, *kwargs.values()])
            if (index, False) in self._halves:
                self._meet(("resid_pre", index), taken, self._halves[index, False])
            self._taken[index] = [part.clone() for part in taken]

        return hook

    def _exit(self, index: int) -> Any:
        def hook(module: nn.Module, _args: Any, out: Any) -> None:
            if module is not self.layers[index]:
                return
            given = self._tensors(out)
            if (index, True) in self._halves:
                self._meet(("resid_post", index), given, self._halves[index, True])
            self._given[index] = [part.clone() for part in given]

        return hook

    def _argument(self, tap: Tap) -> Any:
        """Return a hook that gives a child an edited copy: the layer may use the rows again."""

        def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            places: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
            place, part = next((place, part) for place, part in places if self._tensors(part))
            edited = part.clone()
            self._meet(tap, self._tensors(edited), _FIRST)
            if isinstance(place, int):
                return (*args[:place], edited, *args[place + 1 :]), kwargs
            return args, {**kwargs, place: edited}

        return hook

    def _branch(self, site: str, index: int) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            given = self._results(args, kwargs, out)[:1]
            self._meet((site, index), given, _FIRST)
            if site == "attn_out" and ("resid_mid", index) in self._children and self._taken:
                pre = _stream(self._taken[index], self._halves[index, False])
                self._meet(("resid_mid", index), [*given, pre], _BOTH)

        return hook

    def _meet(self, tap: Tap, parts: Sequence[Tensor], halves: _Halves) -> None:
        """Record the rows at a tap, and edit them in place, in the half that counts."""
        rows = _stream(parts, halves)
        change = self._changes.get(tap)
        if change is not None:
            before, target = rows.cpu().double(), parts[halves.index(1)]
            self._before[tap].append(before.float())
            target.copy_(target.cpu().double() + change(before) - before)
            rows = _stream(parts, halves)
        self._rows[tap].append(rows.cpu().float().clone())


def _stream(parts: Sequence[Tensor], halves: _Halves) -> Tensor:
    """Return the stream that one or two halves make, in their dtype."""
    used = [part for part, factor in zip(parts, halves, strict=False) if factor]
    return used[0] if len(used) == 1 else used[0] + used[1]


def _streams_of(call: _Call) -> list[Tensor]:
    """Return what of a call may be the stream."""
    sums = [call.taken[0] + call.taken[1]] if len(call.taken) == 2 else []
    return [*sums, *call.taken, *call.given]
