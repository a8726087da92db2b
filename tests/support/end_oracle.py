"""The reference for the sites without a layer: transformers in float32, plain hooks."""

from functools import reduce
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from midstream.sites import ENDS, Tap
from support.inner_oracle import INNER, InnerOracle

# Modules of transformers: the one that returns the embedding, empty where the first layer gets it
# as it is; the final norm.
MODULES = {
    "llama": ("", "model.norm"),
    "gemma2": ("", "model.norm"),
    "gpt2": ("transformer.wte", "transformer.ln_f"),
    "opt": ("model.decoder.embed_tokens", "model.decoder.final_layer_norm"),
}


class EndOracle(InnerOracle):
    """Any edits, at any of the sites, those without a layer included."""

    def __init__(self, path: Path, name: str):
        super().__init__(path, INNER[name])
        embedding, norm = MODULES[name]
        embed, final = (("embed", 0), ("final_norm", self.num_layers - 1))
        if embedding:
            self._after(reduce(getattr, embedding.split("."), self.model), embed)
        else:
            layers: Any = reduce(getattr, INNER[name].outer.layers.split("."), self.model)

            def before(_module: nn.Module, args: tuple, kwargs: dict) -> None:
                self._reach(embed, args[0] if args else kwargs["hidden_states"])

            layers[0].register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        self._after(reduce(getattr, norm.split("."), self.model), final)

    def taps(self, edit: Any) -> set[Tap]:
        found = {tap for tap in super().taps(edit) if tap[0] not in ENDS}
        return found | {(site, ENDS[site] % self.num_layers) for site in edit.sites if site in ENDS}

    def scores(self, probe: Any, seen: Any) -> Any:
        (site,) = probe.sites.names
        if site not in ENDS:
            return super().scores(probe, seen)
        from support.formulas import read_score

        return read_score(probe, seen.values[site, ENDS[site] % self.num_layers].double().numpy())

    def _after(self, module: nn.Module, tap: Tap) -> None:
        def after(_module: nn.Module, _args: tuple, out: Tensor) -> None:
            self._reach(tap, out)

        module.register_forward_hook(after)
