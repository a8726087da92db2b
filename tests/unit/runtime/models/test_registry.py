"""Layers that other packages register."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from midstream.errors import SpecError, UnsupportedError
from midstream.layers import Input, Output, pair, register_layer, single
from midstream.runtime.models import registry
from midstream.runtime.models.convention import Half, LayerConvention, Returns

CONVENTION = pair("norm")


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "CONVENTIONS", dict(registry.CONVENTIONS))
    monkeypatch.setattr(registry, "_OTHER_LISTS", [])
    registry.load_registrations.cache_clear()
    yield
    registry.load_registrations.cache_clear()


class Layer:
    def forward(self) -> None:
        pass


class Kept(Layer):
    pass


@pytest.mark.parametrize("layer", [Layer, f"{__name__}.Layer"])
def test_a_registered_layer_and_its_subclasses_are_known(layer):
    assert "midstream.layers.register_layer" in registry.lookup(Layer, Layer()).reason  # type: ignore[union-attr]
    register_layer(layer, CONVENTION)
    assert registry.lookup(Layer, Layer()) is CONVENTION
    assert registry.lookup(Kept, Kept()) is CONVENTION


def test_the_same_may_be_registered_again_and_nothing_else():
    register_layer(Layer, CONVENTION)
    register_layer(Layer, pair("norm"))
    with pytest.raises(SpecError, match="Layer is known already"):
        register_layer(Layer, single("norm"))
    with pytest.raises(SpecError, match="LlamaDecoderLayer is known already"):
        register_layer("vllm.model_executor.models.llama.LlamaDecoderLayer", single("norm"))


def test_a_path_to_the_layers_is_tried_before_the_usual_ones():
    register_layer(Layer, CONVENTION, layers="trunk.stages")
    assert registry.layer_lists()[0] == "trunk.stages"
    register_layer(Layer, CONVENTION, layers="model.layers")
    assert registry.layer_lists().count("model.layers") == 1


@pytest.mark.parametrize(
    ("layer", "convention", "message"),
    [
        ("Layer", CONVENTION, "layer: expected a class or its dotted name"),
        (Layer, "pair", "convention: expected pair"),
    ],
)
def test_what_is_no_layer_or_no_convention_is_refused(layer, convention, message):
    with pytest.raises(SpecError, match=message):
        register_layer(layer, convention)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pair(), "attn: say where attention is added"),
        (lambda: pair("norm", "because"), "give mid or no_mid, not both"),
        (lambda: single(attn="a", mlp_out="m"), "give mid or no_mid, not both"),
        (lambda: single("norm", attention=Output("norm")), "attn: say which module"),
        (lambda: single("norm", mlp=Output("norm")), "mlp_out: say which module"),
        (lambda: pair("mlp", mlp=Input("mlp")), "shared=True"),
        (lambda: single("norm", residual="residual"), "only a pair has a residual"),
        (lambda: pair("norm", attn=Half.AT_EXIT), "two branches in one half"),
        (lambda: pair("norm", mlp_out=Half.AT_MID), "is not there yet"),
        (lambda: single("norm", attn=Half.AT_MID), "only a pair has halves"),
        (lambda: LayerConvention(Returns.SINGLE, mid="norm", mlp_out=Half.AT_EXIT), "only a pair"),
        (lambda: LayerConvention(Returns.PAIR, no_mid="none", attn_out=Half.AT_MID), "at a mid"),
    ],
)
def test_places_that_contradict_each_other_are_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def _register() -> None:
    register_layer(Layer, CONVENTION)


def _fail() -> None:
    raise RuntimeError("no licence")


def test_entry_points_register_once_in_a_process(monkeypatch):
    entry = EntryPoint("mine", f"{__name__}:_register", registry.GROUP)
    calls: list[str] = []

    def entries(group: str) -> list[EntryPoint]:
        calls.append(group)
        return [entry]

    monkeypatch.setattr(EntryPoint, "load", lambda self: _register)
    monkeypatch.setattr(registry, "entry_points", entries)
    registry.load_registrations()
    registry.load_registrations()
    assert registry.lookup(Layer, Layer()) is CONVENTION
    assert calls == ["midstream.layers"]


def test_an_entry_point_that_fails_is_named(monkeypatch):
    entry = EntryPoint("mine", f"{__name__}:_fail", registry.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: _fail)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(UnsupportedError, match="mine of the group midstream.layers.*no licence"):
        registry.load_registrations()
