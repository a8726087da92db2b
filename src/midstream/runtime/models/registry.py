"""Conventions of decoder layers, looked up by class. Unlisted layers are rejected."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import overload

from midstream.errors import SpecError, UnsupportedError
from midstream.runtime.models.convention import Entry, Key, LayerConvention, Refusal
from midstream.runtime.models.hf_layers import HF_MODELS
from midstream.runtime.models.vllm_layers import MODELS, VENDOR


def _key(prefix: str, name: str) -> Key:
    module, _, cls = name.rpartition(".")
    return prefix + module, cls


def _hf_key(name: str) -> Key:
    folder, _, cls = name.partition(".")
    return f"transformers.models.{folder}.modeling_{folder}", cls


# By (module without the leading `vllm.`, name of the class whose body defines `forward`).
CONVENTIONS: dict[Key, Entry] = {
    **{_key("model_executor.models.", name): entry for name, entry in MODELS.items()},
    **{_key("models.", name): entry for name, entry in VENDOR.items()},
    **{_hf_key(name): entry for name, entry in HF_MODELS.items()},
}

# Attribute paths from the language model to the ModuleList of its decoder layers, in the order in
# which they are tried. Only a ModuleList counts (Plamo's `model.layers` is a module with `layers`).
# The language model is `model.get_language_model()` if the model has that method. It may return the
# backbone itself, hence the last paths.
LAYER_LISTS: tuple[str, ...] = (
    "model.layers",
    "transformer.h",  # bloom, exaone, falcon, gpt2, gpt_j
    "model.decoder.layers",  # opt, also on the Transformers backend
    "backbone.layers",  # mamba, mamba2
    "transformer.blocks",  # dbrx, mpt
    "transformer.encoder.layers",  # chatglm
    "encoder.layers",  # glm4v's language model
    "model.layers.layers",  # plamo2, plamo3
    "gpt_neox.layers",  # gpt_neox up to 0.30
    "text.blocks",  # moondream3
    "model.h",  # gpt2, gpt_bigcode on the Transformers backend
    "model.language_model.layers",  # multimodal models on the Transformers backend
    "model.text_model.layers",
    "language_model.model.layers",
    "model.language_model.model.layers",
    "layers",
    "blocks",
)


GROUP = "midstream.layers"  # of entry points: functions that call `register_layer`
_OTHER_LISTS: list[str] = []


def register_layer(
    layer: str | type, convention: LayerConvention, layers: str | None = None
) -> None:
    """Say where the sites are in a class of decoder layers that midstream does not know.

    Call it in each process of the engine, before its model is loaded: from a function that is an
    entry point of the group `midstream.layers`. As the engine starts, a trial run compares the sums
    of the stream at the sites that are tapped, and `midstream doctor` checks every site.

    Args:
        layer: the class, or its dotted name. A subclass that does not override `forward` needs no
            entry of its own.
        convention: what the layer takes and returns; see `midstream.layers.pair` and `single`.
        layers: dotted attribute from the language model to the list of its layers; None: one of the
            usual ones, such as `model.layers`.

    Raises:
        SpecError: the class is known, with another convention; or a name is none.
    """
    if not isinstance(convention, LayerConvention):
        raise SpecError("convention", f"expected pair(…) or single(…), got {convention!r}")
    name = layer if isinstance(layer, str) else f"{layer.__module__}.{layer.__qualname__}"
    module, _, cls = name.rpartition(".")
    if not module:
        raise SpecError("layer", f"expected a class or its dotted name, got {layer!r}")
    key = module.removeprefix("vllm."), cls
    if CONVENTIONS.setdefault(key, convention) != convention:
        raise SpecError("layer", f"{name} is known already, with another convention")
    if layers is not None and layers not in (*LAYER_LISTS, *_OTHER_LISTS):
        _OTHER_LISTS.append(layers)


@cache
def load_registrations() -> None:
    """Call the entry points that register layers, once in a process."""
    for entry in entry_points(group=GROUP):
        try:
            entry.load()()
        except Exception as error:
            raise UnsupportedError(
                f"the entry point {entry.name} of the group {GROUP} failed: "
                f"{type(error).__name__}: {error}"
            ) from error


def layer_lists() -> tuple[str, ...]:
    """Return the paths to a model's layers, registered ones first."""
    return *_OTHER_LISTS, *LAYER_LISTS


def key_of(cls: type) -> Key | None:
    """Return the key of the class whose body defines `forward`, or of a rejected one without."""
    for base in cls.__mro__:
        key = base.__module__.removeprefix("vllm."), base.__qualname__
        # torch.nn.Module has a forward, which only raises.
        if "forward" in base.__dict__ and not base.__module__.startswith("torch."):
            return key
        if isinstance(CONVENTIONS.get(key), Refusal):
            return key
    return None


@overload
def lookup(cls: type) -> Entry: ...


@overload
def lookup(cls: type, layer: object) -> LayerConvention | Refusal: ...


def lookup(cls: type, layer: object | None = None) -> Entry:
    """Return a layer class's convention; with a layer of that class, a `Choice` is decided."""
    key = key_of(cls)
    convention = CONVENTIONS.get(key) if key else None
    if convention is None:
        module, name = key or (cls.__module__, cls.__qualname__)
        return Refusal(
            f"midstream does not know what {module}.{name} takes and returns; say it with "
            "midstream.layers.register_layer"
        )
    return convention if layer is None else convention.resolve(layer)


def replaced_forward(layer: object) -> str | None:
    """Return why a layer's forward is not the one of its class's body; None if it is."""
    own = vars(layer).get("forward")
    # vLLM's offloaders set one that calls the class's.
    if own is not None and not _place_of(own)[0].startswith("vllm.model_executor.offloader"):
        return f"its `forward` was replaced on the layer, by {'.'.join(_place_of(own))}"
    owner = next(base for base in type(layer).__mro__ if "forward" in vars(base))
    place = _place_of(vars(owner)["forward"])
    if place == (owner.__module__, f"{owner.__qualname__}.forward"):
        return None
    return f"`forward` of its class was replaced, by {'.'.join(place)}"


def _place_of(function: object) -> tuple[str, str]:
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
