"""Tapped layers: however they are called, what is refused, what others see of them, compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from support.tapping import ROWS, WIDTH, arm, assert_same_out, make_buffers, read, tapped
from torch import Tensor, nn
from unit.runtime.worker.taps.branching import (
    Norm,
    Pair,
    Single,
    check,
    expect,
    has,
    inputs,
    stream_of,
)

from midstream.errors import TapError, UnsupportedError
from midstream.ops import layout
from midstream.runtime.models.convention import LayerConvention, Returns
from midstream.runtime.models.decoder import DecoderLayer
from midstream.runtime.worker.taps.taps import tap_layer
from midstream.sites import OUTER

MID, POST = ("resid_mid", 0), ("resid_post", 0)
TAPS = {(site, 0): index for index, site in enumerate(OUTER)}


class LatePair(Single):
    """Of the pair's convention, and its residual is None at run time."""

    convention = LayerConvention(Returns.PAIR, residual="residual", mid="norm")

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None = None):
        return super().forward(positions, hidden_states), None

    def reference(self, at, stream: Tensor) -> Tensor:
        known = has(LatePair)
        return super().reference(lambda site, x: at(site, x) if site in known else x, stream)


def at_all_sites(kind):
    """(the layer, the same layer tapped at all of its sites, the buffers)."""
    return tapped(kind, tuple((site, 0) for site in has(kind)))


@pytest.mark.parametrize(
    ("kind", "has_residual"), [(Pair, True), (Pair, False), (Single, False), (LatePair, False)]
)
def test_arguments_may_come_by_position_or_by_keyword(kind, has_residual):
    names, sites = ("positions", "hidden_states", "residual"), has(kind)
    args = inputs(Pair if has_residual else Single)
    if kind is Pair and not has_residual:
        args = (*args, None)
    stream = [value for value in args[1:] if value is not None]
    for split in range(len(args) + 1):
        plain, layer, buffers = at_all_sites(kind)
        arm(buffers, ROWS, len(sites))
        copies = [value if value is None else value.clone() for value in args]
        by_name = dict(zip(names[split:], copies[split:], strict=False))
        with torch.no_grad():
            out = layer(*copies[:split], **by_name)
        wanted, seen = expect(kind, plain, (None, *stream), {})
        torch.testing.assert_close(stream_of(kind, out), wanted)
        torch.testing.assert_close(read(buffers, ROWS, len(sites)), seen)


def test_the_norm_may_be_given_its_residual_by_keyword():
    class ByKeyword(Pair):
        def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
            hidden_states, residual = self._attn_norm(hidden_states, residual)
            hidden_states, residual = self.norm(self._attn(hidden_states), residual=residual)
            return self._mlp(hidden_states), residual

    check(ByKeyword, {"resid_mid": 2.5})


def test_a_layer_none_of_whose_sites_is_tapped_is_left_alone():
    layer = Pair()
    tap_layer(DecoderLayer(5, layer, Pair.convention), TAPS, make_buffers(TAPS))
    assert type(layer) is Pair
    assert type(layer.norm) is Norm
    _, layer, _ = tapped(Pair, (MID,))
    assert type(layer) is Pair
    assert type(layer.norm) is not Norm


def test_disarmed_taps_touch_nothing():
    plain, layer, buffers = at_all_sites(Pair)
    buffers.ring.fill_(-7)
    assert_same_out(layer(*inputs(Pair)), plain(*inputs(Pair)))
    assert bool((buffers.ring == -7).all())
    assert not bool(buffers.tally.any())


# ---------------------------------------------------------------- what must not be


@pytest.mark.parametrize(
    ("returns", "out", "message"),
    [
        (Returns.PAIR, torch.zeros(ROWS, WIDTH), "a layer returned Tensor; its convention"),
        (Returns.PAIR, (torch.zeros(ROWS, WIDTH),), r"a tuple of 1: \(Tensor\)"),
        (Returns.PAIR, (torch.zeros(ROWS, WIDTH),) * 3, r"a tuple of 3: \(Tensor, Tensor, Ten"),
        (Returns.PAIR_NONE, (torch.zeros(ROWS, WIDTH),) * 2, "PAIR_NONE"),
        (Returns.PAIR_DEAD, torch.zeros(ROWS, WIDTH), "PAIR_DEAD"),
        (Returns.SINGLE, (torch.zeros(ROWS, WIDTH), None), r"2: \(Tensor, NoneType\).*SINGLE"),
        (Returns.SINGLE, None, "NoneType; its convention is SINGLE: one tensor, the stream"),
    ],
)
def test_a_layer_that_returns_something_else_is_an_error_and_not_a_guess(returns, out, message):
    class Wrong(Single):
        convention = LayerConvention(returns, mid="norm")

        def forward(self, positions: Tensor, hidden_states: Tensor):
            return out

    _, layer, _ = tapped(Wrong, (POST,))
    with pytest.raises(TapError, match=message):
        layer(None, torch.zeros(ROWS, WIDTH))


@pytest.mark.parametrize("is_tapped_first", [True, False])
def test_an_instance_level_forward_does_not_get_past_the_tap(is_tapped_first):
    """Weight offloaders put one there."""
    layer, calls = Single(), []
    taps = {(site, 0): index for index, site in enumerate(has(Single))}
    buffers = make_buffers(taps)

    def offload():
        own = layer.forward
        layer.forward = lambda *args: calls.append(1) or own(*args)

    def tap():
        tap_layer(DecoderLayer(0, layer, Single.convention), taps, buffers)

    for change in (tap, offload) if is_tapped_first else (offload, tap):
        change()
    arm(buffers, ROWS, len(taps))
    layer(*inputs(Single))
    assert calls == [1]
    assert buffers.tally[:ROWS, layout.CAPTURES].tolist() == [len(taps)] * ROWS


@pytest.mark.parametrize("shared", ["layer", "norm", "mlp"])
def test_a_module_shared_by_two_layers_is_refused(shared):
    first, second = Single(), Single()
    if shared == "layer":
        second = first
    else:
        setattr(second, shared, getattr(first, shared))
    sites = has(Single)
    taps = {(site, layer): 7 * layer + n for layer in (0, 1) for n, site in enumerate(sites)}
    buffers = make_buffers(tuple(taps))
    tap_layer(DecoderLayer(0, first, Single.convention), taps, buffers)
    with pytest.raises(UnsupportedError, match="is shared by several layers"):
        tap_layer(DecoderLayer(1, second, Single.convention), taps, buffers)


# ---------------------------------------------------------------- what others see of it


def test_a_tapped_layer_is_still_what_it_was_to_whoever_asks():
    other = Pair()
    plain, layer, _ = at_all_sites(Pair)
    assert isinstance(layer, Pair)
    assert isinstance(layer.norm, Norm)
    assert type(layer).__name__ == "TappedPair"
    assert type(layer).__module__ == Pair.__module__
    assert list(layer.state_dict()) == list(plain.state_dict())
    assert dict(layer.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert list(layer.named_buffers()) == []
    assert [name for name, _ in layer.named_modules()] == [n for n, _ in plain.named_modules()]
    layer.load_state_dict(other.state_dict())
    assert_same_out(layer(*inputs(Pair)), other(*inputs(Pair)))
    # Others of its classes are left alone.
    assert type(other) is Pair
    assert "__call__" not in vars(Pair)
    assert "__call__" not in vars(nn.Linear)


def test_a_copy_of_a_tapped_layer_is_refused_and_changes_nothing():
    plain, layer, buffers = at_all_sites(Pair)
    copied = copy.deepcopy(layer)
    arm(buffers, ROWS, len(has(Pair)))
    buffers.ring.fill_(-7)
    with pytest.raises(ValueError, match="a copy of a tapped module has no taps of its own"):
        copied(*inputs(Pair))
    assert bool((buffers.ring == -7).all())
    assert_same_out(layer(*inputs(Pair)), plain(*inputs(Pair)))


# ---------------------------------------------------------------- compiled


class Stack(nn.Module):
    """A layer of two halves, another, and the sum of the halves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Pair(), Pair()])

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return hidden + residual


@pytest.mark.engine
def test_a_compiled_stack_of_tapped_layers_does_what_the_eager_one_does():
    torch.manual_seed(5)
    model = Stack()
    places = [*TAPS, ("resid_pre", 1), ("resid_post", 1)]
    taps = {tap: index for index, tap in enumerate(places)}
    buffers = make_buffers(places)
    plain = copy.deepcopy(model)
    for index, layer in enumerate(model.layers):
        tap_layer(DecoderLayer(index, layer, Pair.convention), taps, buffers)
    positions, hidden = torch.arange(ROWS), torch.randn(ROWS, WIDTH)
    compiled = torch.compile(model, fullgraph=True)

    def run(function, edits):
        buffers.ring.zero_()
        arm(buffers, ROWS, len(taps), edits)
        with torch.no_grad():
            out = function(positions, hidden.clone())
        return out, read(buffers, ROWS, len(taps)), buffers.tally.clone()

    with torch.no_grad():
        clean = plain(positions, hidden.clone())
    end, entry = taps["resid_post", 0], taps["resid_pre", 1]
    for edits in ({}, {0: 1.0}, {2: -2.0, 8: 3.0}, {end: 0.5, entry: 0.25, 4: 4.0}):
        wanted, found = run(model, edits), run(compiled, edits)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
        assert torch.allclose(found[0], clean) == (not edits)
        assert found[2][:ROWS, layout.CAPTURES].tolist() == [len(taps)] * ROWS
        assert found[2][:ROWS, layout.EDITS].tolist() == [len(edits)] * ROWS
        # Where one layer ends the next begins, edits at the seam included.
        torch.testing.assert_close(found[1][:, entry], found[1][:, end] + edits.get(entry, 0.0))
