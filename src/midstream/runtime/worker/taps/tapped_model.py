"""The tapped model: a copy of the modules from the compiled ones down, with the same weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

from torch import nn

from midstream.config.config import KEY, Config
from midstream.runtime.models.decoder import Decoder
from midstream.runtime.models.forward_source import Types
from midstream.runtime.worker.tables.device_buffers import Buffers
from midstream.runtime.worker.taps.taps import modules_to_tap, tap_layer
from midstream.sites import Tap

_LOGGER = logging.getLogger(__name__)
_TAG = "tapped"  # for vLLM's compile cache, to separate what both models compile
# Attributes of a compiled module that belong to one compilation.
_COMPILED = (
    "aot_compiled_fn",
    "_compiled_callable",
    "_bytecode_hook_handle",
    "_compiled_bytecode",
)


@dataclass(frozen=True, slots=True)
class Replacement:
    """A module that differs between both models, child of `owner`; None: the model itself."""

    owner: nn.Module | None
    name: str
    plain: nn.Module
    tapped: nn.Module


class TappedCopies:
    """Copies of tapped modules and those around them; `replacements`: the topmost ones."""

    def __init__(self, model: nn.Module, targets: Collection[nn.Module]) -> None:
        self._targets = {id(target) for target in targets}
        self._holds: dict[int, bool] = {}
        self._copies: dict[int, nn.Module] = {}
        # Copies of modules with a copied child: they have attributes of their own.
        self._apart: list[nn.Module] = []
        self.replacements: list[Replacement] = []
        self._replace(None, "", model)

    def __getitem__(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module; the module itself if it is in both models."""
        return self._copies.get(id(module), module)

    def with_own_forward(self) -> list[nn.Module]:
        """Return copied modules whose instance has a `forward`, as weight offloaders set it."""
        return [copied for copied in self._copies.values() if "forward" in vars(copied)]

    def experts_with_router(self) -> list[Any]:
        """Return the copied modules with experts whose router, which they call, is copied."""
        experts = Types.of_vllm().experts
        return [copied for copied in self._apart if isinstance(copied, experts)]

    def _replace(self, owner: nn.Module | None, name: str, module: nn.Module) -> None:
        direct = any(id(child) in self._targets for child in module.children())
        # The whole of a module with a compiled one inside would leave that to one compilation. Such
        # a module has a target itself where its head is the embedding.
        if direct and any(map(is_compiled, module.modules())):
            direct = False
        if is_compiled(module) or direct or id(module) in self._targets:
            self.replacements.append(Replacement(owner, name, module, self._copy(module)))
            return
        for child_name, child in module.named_children():
            if self._is_copied(child):
                self._replace(module, child_name, child)

    def _is_copied(self, module: nn.Module) -> bool:
        is_copied = self._holds.get(id(module))
        if is_copied is None:
            is_copied = id(module) in self._targets or any(
                self._is_copied(child) for child in module.children()
            )
            self._holds[id(module)] = is_copied
        return is_copied

    def _copy(self, module: nn.Module) -> nn.Module:
        if id(module) in self._copies:
            return self._copies[id(module)]
        made = object.__new__(type(module))
        self._copies[id(module)] = made
        attributes = vars(module)
        if any(self._is_copied(child) for child in module.children()):
            self._apart.append(made)
            attributes = dict(attributes)
            attributes["_modules"] = {
                name: self._copy(child) if child is not None and self._is_copied(child) else child
                for name, child in module._modules.items()
            }
            for name, value in attributes.items():
                if isinstance(value, MethodType) and value.__self__ is module:
                    attributes[name] = MethodType(value.__func__, made)
        # Otherwise both have one dict: what vLLM sets later on one of them, both have.
        object.__setattr__(made, "__dict__", attributes)
        return made


def add_taps(
    model: nn.Module,
    decoder: Decoder,
    taps: dict[Tap, int],
    buffers: Buffers,
    vllm_config: Any,
    config: Config,
) -> list[Replacement]:
    """Add a rank's taps to a copy of the model, or the model; return the modules that differ."""
    copies = TappedCopies(model, _targets(decoder, taps))
    reason = _why_one_model(copies, vllm_config, config)
    if reason is not None:
        _LOGGER.info("midstream: every step runs the tapped model, as %s", reason)
        for layer in decoder.layers:
            tap_layer(layer, taps, buffers)
        return []
    for layer in decoder.layers:
        ends = {site: None if end is None else copies[end] for site, end in layer.ends.items()}
        tap_layer(replace(layer, module=copies[layer.module], ends=ends), taps, buffers)
    for replacement in copies.replacements:
        separate_compilation(replacement, vllm_config)
    name_experts(copies, vllm_config)
    return copies.replacements


def _targets(decoder: Decoder, taps: Iterable[Tap]) -> list[nn.Module]:
    sites: dict[int, set[str]] = {}
    for site, index in taps:
        sites.setdefault(index, set()).add(site)
    return [
        module
        for layer in decoder.layers
        if layer.index in sites
        for module in modules_to_tap(layer, sites[layer.index])
    ]


def _why_one_model(copies: TappedCopies, vllm_config: Any, config: Config) -> str | None:
    """Return why the model itself is tapped; None if a copy of it is."""
    if config.tapped_model in ("always", "exact"):
        return f'tapped_model is "{config.tapped_model}"'
    import vllm.envs as envs

    # Dynamo alone keeps what it compiles by function, and both models have the same functions.
    modes = ["NONE", "VLLM_COMPILE", *(["DYNAMO_TRACE_ONCE"] if envs.VLLM_USE_AOT_COMPILE else [])]
    mode = vllm_config.compilation_config.mode.name
    if mode not in modes:
        return f"two models cannot be compiled side by side in the compilation mode {mode}"
    hidden = copies.with_own_forward()
    if hidden:
        return (
            f"a {type(hidden[0]).__qualname__} has a forward of its own, as weight offloading sets"
        )
    return None


def is_compiled(module: nn.Module) -> bool:
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    return isinstance(module, TorchCompileWithNoGuardsWrapper) and not module.do_not_compile


def separate_compilation(replacement: Replacement, vllm_config: Any) -> None:
    """Compile both modules of a replacement apart: the plain one as vLLM without midstream."""
    from vllm.compilation.backends import set_model_tag
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
    from vllm.config import set_current_vllm_config

    plain, tapped = replacement.plain, replacement.tapped
    if not is_compiled(plain):
        return
    for name in _COMPILED:
        vars(tapped).pop(name, None)
    with set_current_vllm_config(vllm_config), set_model_tag(_TAG):
        TorchCompileWithNoGuardsWrapper.__init__(tapped)
    vars(tapped)["_compile_tag"] = _TAG
    vars(plain)["vllm_config"] = without_midstream(vllm_config)


def name_experts(copies: TappedCopies, vllm_config: Any) -> None:
    """Name copied modules with experts that call a tapped router: vLLM's op finds these by name."""
    named = vllm_config.compilation_config.static_forward_context
    for experts in copies.experts_with_router():
        experts.layer_name = f"{experts.layer_name}.{_TAG}"
        named[experts.layer_name] = experts


def without_midstream(vllm_config: Any) -> Any:
    """Return an engine's settings without midstream's; all other settings are the same objects."""
    plain = copy.copy(vllm_config)
    plain.additional_config = {
        name: value for name, value in vllm_config.additional_config.items() if name != KEY
    }
    return plain
