"""Plain PyTorch hooks on vLLM's own modules, in requests of an engine in this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from midstream.lab.attribution.hooked.inner_hooks import removing
from midstream.lab.attribution.hooked.model import TOWERS
from midstream.lab.tools.doctor.engine import sampling
from midstream.lab.tools.doctor.reference import Change, ForwardPass
from midstream.sites import ENDS, OUTER, Tap

INNER_MISSING = "with vLLM's own modules, sites inside attention and the MLP are not compared"
# How the halves that a layer takes and returns make the stream: the factors of both.
FIRST, SECOND, BOTH = (1, 0), (0, 1), (1, 1)
Halves = tuple[int, int]


class NoOwnModules(Exception):
    """The engine's own modules cannot be compared with."""


class HookedModules:
    """vLLM's model without taps, run on one request at a time.

    Attributes:
        layers: its decoder layers.
        vocabulary: number of token ids.
        image_prompts: token ids of the prompts with an image.
    """

    def __init__(self, llm: Any) -> None:
        """Take the modules of an engine in this process that has not run a request with a plan."""
        self._llm = llm
        # After a plain request the runner has the model without taps.
        # (Of two tokens: the convolution of Qwen3.5 in vLLM's CPU build does not take one.)
        llm.generate([{"prompt_token_ids": [1, 1]}], sampling(1), use_tqdm=False)
        self._model: nn.Module = llm.apply_model(lambda model: model)[0]
        text = llm.llm_engine.model_config.hf_text_config
        self.vocabulary = int(text.vocab_size)
        self._width, self.layers = (
            llm.info.shape.hidden_size,
            find_layers(self._model, llm.info.shape.num_layers),
        )
        self.image_prompts: list[list[int]] = []
        self._requests: dict[tuple[int, ...], dict[str, Any]] = {}
        self._changes: Mapping[Tap, Change] = {}
        self._rows: dict[Tap, list[Tensor]] = defaultdict(list)
        self._before: dict[Tap, list[Tensor]] = defaultdict(list)
        self._logits: list[Tensor] = []
        self._taken: dict[int, list[Tensor]] = {}
        self._given: dict[int, list[Tensor]] = {}
        # Layers that are called with modules, which read and give what no child of the layer does.
        self._visited: set[int] = set()
        # Halves at the entry (False) and exit (True) of each layer, where it is known; and by
        # (site, layer) the child whose input or output the site is; of an input that other modules
        # read too, the child that gives it.
        self._halves: dict[tuple[int, bool], Halves] = {}
        self._children: dict[Tap, str] = {}
        self._givers: dict[Tap, str] = {}
        self._ends: dict[str, nn.Module] = {}

    def add_image(self, request: dict[str, Any]) -> None:
        """Add an engine's prompt with an image; its token ids are those that vLLM makes of it."""
        output = self._llm.generate([request], sampling(1), use_tqdm=False)[0]
        self.image_prompts.append(list(output.prompt_token_ids))
        self._requests[tuple(output.prompt_token_ids)] = request

    def request(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Return the engine's prompt for token ids."""
        return self._requests.get(tuple(prompt), {"prompt_token_ids": list(prompt)})

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
        if list(prompt) in self.image_prompts:
            # The table's rows are not those of the image, which take their places later.
            values = {tap: rows for tap, rows in values.items() if tap[0] != "embed"}
        before = {tap: torch.cat(parts) for tap, parts in self._before.items()}
        return tokens, ForwardPass(torch.cat([earlier, logits]), values, before)

    def _request(self, prompt: Sequence[int], count: int, **plan: Any) -> list[int]:
        """Run one request with hooks; return the generated tokens."""
        for record in (self._rows, self._before, self._logits, self._taken, self._given):
            record.clear()
        with removing(self._hooks()):
            output = self._llm.generate(
                [self.request(prompt)], sampling(count), use_tqdm=False, **plan
            )[0]
        return list(output.outputs[0].token_ids)

    def _tensors(self, values: Any) -> list[Tensor]:
        """Return the rows [T, H], or of several streams [T, S, H], among arguments or results."""
        parts = list(values) if isinstance(values, (tuple, list)) else [values]
        return [
            part.transpose(0, 1)
            if part.dim() == 3 and len(part) > 1
            else part.view(-1, self._width)
            for part in parts
            if isinstance(part, Tensor)
            and part.is_floating_point()
            and part.dim() in (2, 3)
            and part.shape[-1] == self._width
        ]

    def _results(self, args: Any, kwargs: Any, out: Any) -> list[Tensor]:
        """Return what a module gave; some write into their last argument."""
        return self._tensors([*args, *kwargs.values()])[-1:] if out is None else self._tensors(out)

    def _hooks(self) -> list[Any]:
        """Register hooks that record and edit at every site that was found, and the logits."""
        handles = []
        for index, layer in enumerate(self.layers):
            handles.append(layer.register_forward_pre_hook(self._entry(index), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._exit(index)))
            for site in ("attn_in", "mlp_in", "attn_out", "resid_mid", "mlp_out"):
                name = self._children.get((site, index))
                if name is None:
                    continue
                giver = self._givers.get((site, index))
                child = layer.get_submodule(giver or name)
                if giver is not None:
                    hook = self._output((site, index))
                    handles.append(child.register_forward_hook(hook, with_kwargs=True))
                    continue
                if site.endswith("_in"):
                    hook = self._argument((site, index))
                elif site == "resid_mid" and name != self._children["attn_out", index]:
                    hook = self._sum((site, index))
                else:
                    hook = self._branch(site, index)
                    handles.append(child.register_forward_hook(hook, with_kwargs=True))
                    continue
                handles.append(child.register_forward_pre_hook(hook, with_kwargs=True))
        for site, module in self._ends.items():
            tap = site, ENDS[site] % len(self.layers)
            handles.append(
                module.register_forward_hook(
                    lambda _m, _a, out, tap=tap: self._meet(tap, self._tensors(out), FIRST)
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
            if any(isinstance(part, nn.Module) for part in (*args, *kwargs.values())):
                self._visited.add(index)
            taken = self._tensors([*args, *kwargs.values()])
            if (index, False) in self._halves:
                self._meet(("resid_pre", index), taken, self._halves[index, False])
            self._taken[index] = [part.cpu().clone() for part in taken]

        return hook

    def _exit(self, index: int) -> Any:
        def hook(module: nn.Module, _args: Any, out: Any) -> None:
            if module is not self.layers[index]:
                return
            given = self._tensors(out)
            if (index, True) in self._halves:
                self._meet(("resid_post", index), given, self._halves[index, True])
            self._given[index] = [part.cpu().clone() for part in given]

        return hook

    def _argument(self, tap: Tap) -> Any:
        """Return a hook that gives a child an edited copy: the layer may use the rows again."""

        def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            places: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
            place, part = next((place, part) for place, part in places if self._tensors(part))
            edited = part.clone()
            self._meet(tap, self._tensors(edited), FIRST)
            if isinstance(place, int):
                return (*args[:place], edited, *args[place + 1 :]), kwargs
            return args, {**kwargs, place: edited}

        return hook

    def _output(self, tap: Tap) -> Any:
        """Return a hook that edits what a child gives, for all that read it."""

        def hook(_module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            self._meet(tap, self._results(args, kwargs, out)[:1], FIRST)

        return hook

    def _sum(self, tap: Tap) -> Any:
        """Return a hook for a child that takes both halves of a sum."""

        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._meet(tap, self._tensors([*args, *kwargs.values()]), BOTH)

        return hook

    def _branch(self, site: str, index: int) -> Any:
        """Return a hook for a child's output, or for its sum with the stream at the entry."""

        def hook(_module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            given = self._results(args, kwargs, out)[:1]
            if site != "resid_mid":
                self._meet((site, index), given, FIRST)
            elif self._taken:
                pre = stream(self._taken[index], self._halves[index, False]).to(given[0])
                parts = [given[0].clone(), pre.clone()]
                self._meet((site, index), parts, BOTH)
                if (site, index) in self._changes:
                    given[0].copy_(stream(parts, BOTH).double() - pre.double())

        return hook

    def _meet(self, tap: Tap, parts: Sequence[Tensor], halves: Halves) -> None:
        """Record the rows at a tap, and edit them in place, in the half that counts."""
        rows = stream(parts, halves)
        change = self._changes.get(tap)
        if change is not None:
            used = [part for part, factor in zip(parts, halves, strict=False) if factor]
            before = torch.stack([part.cpu().double() for part in used]).sum(dim=0)
            self._before[tap].append(before.flatten(1).float())
            changed = change(before.flatten(1)).view_as(before)
            # The last half gets the rows, the other what was rounded off.
            for part in reversed(used):
                part.copy_(changed)
                changed = changed - part.cpu().double()
            rows = stream(parts, halves)
        self._rows[tap].append(rows.flatten(1).cpu().float().clone())


def find_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """Return the decoder layers of a model that has `count` of them."""
    # vLLM's multimodal classes say which of their modules that is.
    named = getattr(model, "get_language_model", None)
    language_model = model if named is None else named()
    lists = [
        (name.count("."), list(module))
        for name, module in language_model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and not any(part in name for part in TOWERS)
    ]
    if not lists:
        raise NoOwnModules(f"no module list of it has {count} layers")
    return min(lists, key=lambda candidate: candidate[0])[1]


def stream(parts: Sequence[Tensor], halves: Halves) -> Tensor:
    """Return the stream that one or two halves make, in their dtype."""
    used = [part for part, factor in zip(parts, halves, strict=False) if factor]
    return used[0] if len(used) == 1 else used[0] + used[1]
