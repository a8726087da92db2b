"""The copy of a model that has the taps: same weights, other modules."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from midstream.config.config import KEY, Config
from midstream.runtime.worker.model_runner.model_switch import PLAIN, TAPPED, ModelSwitch
from midstream.runtime.worker.taps import tapped_model
from midstream.runtime.worker.taps.tapped_model import (
    TappedCopies,
    name_experts,
    separate_compilation,
)

ROWS, WIDTH = 5, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.Linear(WIDTH, WIDTH)
        # vLLM's custom ops choose a method of their own at construction.
        self.chosen = self.double

    def double(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.attention(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.chosen(x)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x)


class Plus(nn.Module):
    """A tap that is easy to see."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.0


def add_one(module: nn.Module) -> None:
    module.__class__ = type("Tapped", (Plus, type(module)), {})


class Runner:
    def __init__(self, model):
        self.model = model


class Worker:
    def __init__(self, model):
        self.model_runner = Runner(model)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def model_with_copies(targets):
    torch.manual_seed(1)
    model = Model()
    return model, TappedCopies(model, [module for name in targets for module in [of(model, name)]])


def of(model, name):
    return model.get_submodule(name)


LAYERS = [f"backbone.layers.{n}" for n in range(3)]
MLPS = [f"{layer}.mlp" for layer in LAYERS]


@pytest.mark.parametrize("targets", [LAYERS, LAYERS + MLPS, LAYERS[1:2], [LAYERS[0], *MLPS[:1]]])
def test_the_copy_has_the_taps_and_the_model_has_none(x, targets):
    model, copies = model_with_copies(targets)
    expected = model(x)
    for name in targets:
        add_one(copies[of(model, name)])
    switch = ModelSwitch(Worker(model), copies.replacements, False, False, None)
    assert torch.equal(model(x), expected)
    switch.use(TAPPED)
    tapped = model(x)
    # By hand: the same sum with 1 added after each target.
    by_hand = model.backbone.embed(x)
    for n in range(3):
        layer = copies[of(model, LAYERS[n])]
        mlp = nn.functional.linear(
            nn.functional.linear(by_hand, layer.attention.weight, layer.attention.bias),
            layer.mlp.weight,
            layer.mlp.bias,
        )
        by_hand = by_hand + mlp + (MLPS[n] in targets) + (LAYERS[n] in targets)
    torch.testing.assert_close(tapped, by_hand)
    switch.use(PLAIN)
    assert torch.equal(model(x), expected)


def test_both_models_have_the_same_weights_also_after_they_were_replaced(x):
    model, copies = model_with_copies(LAYERS + MLPS)
    switch = ModelSwitch(Worker(model), copies.replacements, False, False, None)
    plain = dict(model.named_parameters())
    switch.use(TAPPED)
    tapped = dict(model.named_parameters())
    assert plain.keys() == tapped.keys()
    assert all(plain[name] is tapped[name] for name in plain)
    switch.use(PLAIN)
    with torch.no_grad():
        for name in (*LAYERS, *MLPS):
            for module in of(model, name).children() or [of(model, name)]:
                module.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    expected = model(x)
    switch.use(TAPPED)
    assert torch.equal(model(x), expected)


def test_the_compiled_module_is_replaced_where_the_head_is_the_embedding(x, monkeypatch):
    """The head is outside of what is compiled, and a target as it is the embedding."""
    monkeypatch.setattr(tapped_model, "is_compiled", lambda module: isinstance(module, Backbone))
    model = Model()
    model.head = model.backbone.embed
    copies = TappedCopies(model, [of(model, "backbone.embed"), *(of(model, n) for n in LAYERS)])
    places = {(one.owner, one.name) for one in copies.replacements}
    assert places == {(model, "backbone"), (model, "head")}
    add_one(copies[model.head])
    switch = ModelSwitch(Worker(model), copies.replacements, False, False, None)
    switch.use(TAPPED)
    assert model.head is model.backbone.embed
    tapped = model(x)
    switch.use(PLAIN)
    assert not torch.equal(model(x), tapped)


def test_an_attribute_that_is_set_later_is_seen_by_the_copy_of_a_module_without_copied_children():
    model, copies = model_with_copies(LAYERS + MLPS)
    mlp = of(model, MLPS[0])
    mlp.mapping = "adapter"
    assert copies[mlp].mapping == "adapter"


def test_a_module_with_a_forward_of_its_own_is_found():
    model, copies = model_with_copies(LAYERS)
    assert copies.with_own_forward() == []
    model = Model()
    layer = of(model, LAYERS[1])
    layer.forward = lambda x: x
    assert len(TappedCopies(model, [layer]).with_own_forward()) == 1


@pytest.mark.parametrize("setting", ["always", "exact"])
def test_an_exact_engine_has_one_model(setting):
    reason = tapped_model._why_one_model(None, None, Config(tapped_model=setting))
    assert reason == f'tapped_model is "{setting}"'


NAMED: dict[str, nn.Module] = {}


class Experts(nn.Module):
    """Called as vLLM calls its own: by an op that is given a name."""

    def __init__(self, name: str):
        super().__init__()
        self.layer_name = name
        self.gate = nn.Linear(WIDTH, WIDTH)
        NAMED[name] = self

    def forward(self, x: Tensor) -> Tensor:
        return NAMED[self.layer_name].called_by_op(x)

    def called_by_op(self, x: Tensor) -> Tensor:
        return self.gate(x)


@pytest.mark.parametrize("target", ["gate", ""])
def test_the_op_for_experts_calls_the_router_of_the_model_that_runs(x, target, monkeypatch):
    """The second: experts that are tapped themselves keep their name, as their router is shared."""
    types = SimpleNamespace(experts=Experts)
    monkeypatch.setattr(tapped_model.Types, "of_vllm", staticmethod(lambda: types))
    NAMED.clear()
    torch.manual_seed(1)
    model = Model()
    for n, layer in enumerate(model.backbone.layers):
        layer.mlp = Experts(f"layers.{n}.experts")
    plain = dict(NAMED)
    expected = model(x)
    targets = [of(model, f"{name}.{target}".rstrip(".")) for name in MLPS]
    copies = TappedCopies(model, targets)
    for one in targets:
        add_one(copies[one])
    settings = SimpleNamespace(static_forward_context=NAMED)
    name_experts(copies, SimpleNamespace(compilation_config=settings))
    assert {name: NAMED[name] for name in plain} == plain
    assert len(NAMED) == (6 if target else 3)
    switch = ModelSwitch(Worker(model), copies.replacements, False, False, None)
    assert torch.equal(model(x), expected)
    switch.use(TAPPED)
    by_hand = model.backbone.embed(x)
    for n in range(3):
        layer = of(model, LAYERS[n])
        by_hand = by_hand + plain[f"layers.{n}.experts"].gate(layer.attention(by_hand)) + 1.0
    torch.testing.assert_close(model(x), by_hand)
    switch.use(PLAIN)
    assert torch.equal(model(x), expected)


def test_each_model_has_entries_of_its_own_in_the_compile_cache(monkeypatch):
    """The plain one has those of vLLM without midstream."""
    from vllm.compilation import backends, wrapper
    from vllm.config import VllmConfig, get_current_vllm_config

    made = []
    monkeypatch.setattr(tapped_model, "is_compiled", lambda module: isinstance(module, Backbone))
    monkeypatch.setattr(
        wrapper.TorchCompileWithNoGuardsWrapper,
        "__init__",
        lambda self: made.append((self, get_current_vllm_config(), backends.model_tag)),
    )
    config = VllmConfig(additional_config={KEY: {"enabled": True}, "other": 1})
    model = Model()
    model.backbone.vllm_config = config
    (one,) = TappedCopies(model, [of(model, name) for name in LAYERS]).replacements
    assert one.plain is model.backbone
    separate_compilation(one, config)
    ((module, used, tag),) = made
    assert module is one.tapped
    stock = VllmConfig(additional_config={"other": 1}).compute_hash()
    assert one.plain.vllm_config.compute_hash() == stock
    for tapped in (used, one.tapped.vllm_config):
        assert tapped.compute_hash() == config.compute_hash() != stock
    assert tag == one.tapped._compile_tag != backends.model_tag
