"""Taps on small layers of every convention, eager and compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from support import tapping
from support.tapping import ROWS, WIDTH, arm, assert_same_out, make_buffers, read
from torch import Tensor, nn

from midstream.errors import TapError, UnsupportedError
from midstream.ops import layout
from midstream.runtime.models.convention import LayerConvention, Returns
from midstream.runtime.models.decoder import DecoderLayer
from midstream.runtime.worker.tables.device_buffers import code
from midstream.runtime.worker.taps.taps import tap_layer

PRE, MID, POST = ("resid_pre", 0), ("resid_mid", 0), ("resid_post", 0)
SITES = (PRE, MID, POST)


class Norm(nn.Module):
    """vLLM's: with a residual it adds first, and returns both."""

    def forward(self, x: Tensor, residual: Tensor | None = None):
        if residual is None:
            return x * 0.5
        stream = x + residual
        return stream * 0.5, stream


class PairLayer(nn.Module):
    """`(hidden, residual)` in and out; residual is None in the first layer."""

    convention = LayerConvention(Returns.PAIR, residual="residual", mid="norm")

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = Norm()

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        residual = hidden_states if residual is None else hidden_states + residual
        hidden_states = self.mix(residual)
        hidden_states, residual = self.norm(hidden_states, residual)
        return self.mix(hidden_states), residual


class SingleLayer(nn.Module):
    """The stream in and out."""

    convention = LayerConvention(Returns.SINGLE, mid="norm")

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = Norm()

    def forward(self, positions: Tensor, hidden_states: Tensor):
        hidden_states = hidden_states + self.mix(hidden_states)
        return hidden_states + self.mix(self.norm(hidden_states))


class DeadLayer(SingleLayer):
    """Takes and returns a residual that nobody reads."""

    convention = LayerConvention(Returns.PAIR_DEAD, mid="norm")

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None = None):
        return super().forward(positions, hidden_states), torch.full_like(hidden_states, 99.0)


class NoneLayer(SingleLayer):
    """Returns `(stream, None)`."""

    convention = LayerConvention(Returns.PAIR_NONE, mid="norm")

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: None = None):
        return super().forward(positions, hidden_states), None


class LatePairLayer(SingleLayer):
    """Of the pair's convention, and its residual is None at run time."""

    convention = LayerConvention(Returns.PAIR, residual="residual", mid="norm")

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None = None):
        return super().forward(positions, hidden_states), None


KINDS = [PairLayer, SingleLayer, DeadLayer, NoneLayer, LatePairLayer]


def tapped(kind, sites=SITES):
    """(a layer, the same layer tapped, the buffers)."""
    return tapping.tapped(kind, sites)


def inputs(kind, shape=(ROWS, WIDTH), residual=True):
    torch.manual_seed(4)
    hidden = torch.randn(shape)
    if kind is PairLayer:
        return torch.arange(ROWS), hidden, torch.randn(shape) if residual else None
    return torch.arange(ROWS), hidden


def streams(kind, layer, args) -> Tensor:
    """[rows, 3, width]: the stream at the three sites, by plain hooks on an untapped layer."""
    seen = {}

    def both(hidden, residual):
        total = hidden if residual is None else hidden + residual
        return total.detach().reshape(-1, WIDTH).clone()

    seen["pre"] = both(args[1], args[2] if len(args) > 2 else None)
    handle = layer.norm.register_forward_pre_hook(
        lambda _m, given: seen.update(mid=both(given[0], given[1] if len(given) > 1 else None))
    )
    out = layer(*args)
    handle.remove()
    hidden, residual = out if isinstance(out, tuple) else (out, None)
    if kind.convention.returns is Returns.PAIR_DEAD:
        residual = None
    seen["post"] = both(hidden, residual)
    return torch.stack([seen["pre"], seen["mid"], seen["post"]], dim=1)


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (1, ROWS, WIDTH)], ids=["TH", "1TH"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_stream_is_read_at_all_three_sites_and_nothing_is_changed(kind, shape):
    plain, layer, buffers = tapped(kind)
    args = inputs(kind, shape)
    arm(buffers, ROWS, 3)
    out = layer(*args)
    assert_same_out(out, plain(*args))
    torch.testing.assert_close(read(buffers, ROWS, 3), streams(kind, plain, args))
    signature = sum(map(code, SITES))
    wrapped = (signature + 2**31) % 2**32 - 2**31
    assert buffers.tally[:ROWS, layout.SIGNATURE].tolist() == [wrapped] * ROWS
    assert buffers.tally[:ROWS, layout.CAPTURES].tolist() == [3] * ROWS


def test_the_first_layer_of_a_pair_has_no_residual_yet():
    plain, layer, buffers = tapped(PairLayer)
    args = inputs(PairLayer, residual=False)
    arm(buffers, ROWS, 3)
    assert_same_out(layer(*args), plain(*args))
    torch.testing.assert_close(read(buffers, ROWS, 3), streams(PairLayer, plain, args))


@pytest.mark.parametrize("kind", [PairLayer, SingleLayer], ids=lambda kind: kind.__name__)
def test_arguments_may_come_by_position_or_by_keyword(kind):
    _, layer, buffers = tapped(kind)
    names = ("positions", "hidden_states", "residual")
    args = inputs(kind)
    arm(buffers, ROWS, 3)
    layer(*args)
    wanted = read(buffers, ROWS, 3)
    for split in range(len(args)):
        buffers.ring.zero_()
        buffers.tally.zero_()
        layer(*args[:split], **dict(list(zip(names, args, strict=False))[split:]))
        torch.testing.assert_close(read(buffers, ROWS, 3), wanted)


def test_the_norm_may_be_given_its_residual_by_keyword():
    class ByKeyword(PairLayer):
        def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
            hidden_states, residual = self.norm(self.mix(hidden_states), residual=residual)
            return hidden_states, residual

    _, layer, buffers = tapped(ByKeyword, sites=(MID,))
    _, hidden, residual = inputs(PairLayer)
    arm(buffers, ROWS, 1)
    layer(None, hidden, residual)
    torch.testing.assert_close(read(buffers, ROWS, 1)[:, 0], layer.mix(hidden) + residual)


@pytest.mark.parametrize("kept", [(PRE,), (MID,), (POST,), (PRE, POST)])
def test_only_the_sites_asked_for_are_tapped(kept):
    plain, layer, buffers = tapped(PairLayer, sites=kept)
    args = inputs(PairLayer)
    arm(buffers, ROWS, len(kept))
    layer(*args)
    places = [SITES.index(tap) for tap in kept]
    wanted = streams(PairLayer, plain, args)[:, places]
    torch.testing.assert_close(read(buffers, ROWS, len(kept)), wanted)
    assert (type(layer) is PairLayer) == (kept == (MID,))
    assert (type(layer.norm) is Norm) == (MID not in kept)


def test_a_layer_none_of_whose_sites_is_tapped_is_left_alone():
    layer = PairLayer()
    tap_layer(DecoderLayer(5, layer, PairLayer.convention), {PRE: 0}, make_buffers((PRE,)))
    assert type(layer) is PairLayer
    assert type(layer.norm) is Norm


def test_disarmed_taps_touch_nothing():
    plain, layer, buffers = tapped(PairLayer)
    args = inputs(PairLayer)
    buffers.ring.fill_(-7)
    assert_same_out(layer(*args), plain(*args))
    assert bool((buffers.ring == -7).all())
    assert not bool(buffers.tally.any())


# ---------------------------------------------------------------- editing


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_edit_at_the_entry_is_seen_by_the_layer(kind):
    plain, layer, buffers = tapped(kind)
    position, hidden, *rest = inputs(kind)
    wanted = plain(position, hidden + 2.5, *rest)
    arm(buffers, ROWS, 3, edits={0: 2.5})
    assert_same_out(layer(position, hidden.clone(), *rest), wanted)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_edit_in_the_middle_is_seen_by_the_mlp_and_by_the_skip(kind):
    plain, layer, buffers = tapped(kind)
    args = inputs(kind)
    clean = streams(kind, plain, args)
    arm(buffers, ROWS, 3, edits={1: 2.5})
    layer(*inputs(kind))
    found = read(buffers, ROWS, 3)
    torch.testing.assert_close(found[:, 0], clean[:, 0])
    torch.testing.assert_close(found[:, 1], clean[:, 1] + 2.5)
    # Both branches see it: the skip's 2.5, and the MLP's, of half of that.
    through = plain.mix(torch.full((1, WIDTH), 1.25)) - plain.mix(torch.zeros(1, WIDTH))
    torch.testing.assert_close(found[:, 2], clean[:, 2] + 2.5 + through.detach())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_edit_at_the_exit_is_in_what_the_layer_returns_and_only_there(kind):
    plain, layer, buffers = tapped(kind)
    args = inputs(kind)
    out = plain(*args)
    hidden = out[0] if isinstance(out, tuple) else out
    arm(buffers, ROWS, 3, edits={2: 2.5})
    found = layer(*args)
    if kind.convention.returns is Returns.PAIR and out[1] is not None:
        torch.testing.assert_close(found[0] + found[1], out[0] + out[1] + 2.5)
    else:
        wanted = (hidden + 2.5, out[1]) if isinstance(out, tuple) else hidden + 2.5
        assert_same_out(found, wanted)
    torch.testing.assert_close(read(buffers, ROWS, 3)[:, :2], streams(kind, plain, args)[:, :2])


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
    class Wrong(SingleLayer):
        convention = LayerConvention(returns, mid="norm")

        def forward(self, positions: Tensor, hidden_states: Tensor):
            return out

    _, layer, _ = tapped(Wrong, sites=(POST,))
    with pytest.raises(TapError, match=message):
        layer(None, torch.zeros(ROWS, WIDTH))


def test_an_instance_level_forward_does_not_get_past_the_tap():
    # Weight offloaders put one there.
    plain, layer, buffers = tapped(SingleLayer)
    own = layer.forward
    calls = []

    def offloaded(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    layer.forward = offloaded
    args = inputs(SingleLayer)
    arm(buffers, ROWS, 3)
    layer(*args)
    assert calls == [1]
    torch.testing.assert_close(read(buffers, ROWS, 3), streams(SingleLayer, plain, args))


def test_a_layer_that_is_already_offloaded_is_tapped_all_the_same():
    layer = SingleLayer()
    own = layer.forward
    layer.forward = lambda *args: own(*args)
    buffers = make_buffers((POST,))
    tap_layer(DecoderLayer(0, layer, SingleLayer.convention), {POST: 0}, buffers)
    arm(buffers, ROWS, 1)
    layer(*inputs(SingleLayer))
    assert bool(buffers.tally[:ROWS, layout.CAPTURES].all())


@pytest.mark.parametrize("shared", ["layer", "norm"])
def test_a_module_shared_by_two_layers_is_refused(shared):
    first, second = SingleLayer(), SingleLayer()
    if shared == "layer":
        second = first
    else:
        second.norm = first.norm
    taps = {(site, layer): 3 * layer + n for layer in (0, 1) for n, (site, _) in enumerate(SITES)}
    buffers = make_buffers(tuple(taps))
    tap_layer(DecoderLayer(0, first, SingleLayer.convention), taps, buffers)
    with pytest.raises(UnsupportedError, match="is shared by several layers"):
        tap_layer(DecoderLayer(1, second, SingleLayer.convention), taps, buffers)


@pytest.mark.parametrize(
    ("convention", "message"),
    [
        (LayerConvention(Returns.SINGLE, hidden="x", mid="norm"), "no parameter 'x'; it has pos"),
        (LayerConvention(Returns.PAIR, residual="skip", mid="norm"), "no parameter 'skip'"),
        (LayerConvention(Returns.SINGLE, mid="ln_2"), "no module 'ln_2', where its convention has"),
        (LayerConvention(Returns.SINGLE, mid="norm.inner"), "has no module 'norm.inner'"),
        (LayerConvention(Returns.SINGLE, mid="forward"), "has no module 'forward'"),
    ],
)
def test_a_layer_that_is_not_as_its_convention_says_is_refused(convention, message):
    taps = {tap: n for n, tap in enumerate(SITES)}
    with pytest.raises(UnsupportedError, match=message):
        tap_layer(DecoderLayer(0, SingleLayer(), convention), taps, make_buffers(SITES))


# ---------------------------------------------------------------- what others see of it


def test_a_tapped_layer_is_still_what_it_was_to_whoever_asks():
    plain, layer, _ = tapped(PairLayer)
    assert isinstance(layer, PairLayer)
    assert isinstance(layer.norm, Norm)
    assert type(layer).__name__ == "TappedPairLayer"
    assert type(layer).__module__ == PairLayer.__module__
    assert list(layer.state_dict()) == list(plain.state_dict())
    assert dict(layer.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert list(layer.named_buffers()) == []
    assert [name for name, _ in layer.named_modules()] == [n for n, _ in plain.named_modules()]


def test_weights_can_be_loaded_into_a_tapped_layer():
    plain, layer, _ = tapped(PairLayer)
    fresh = PairLayer()
    layer.load_state_dict(fresh.state_dict())
    args = inputs(PairLayer)
    assert_same_out(layer(*args), fresh(*args))
    assert not torch.equal(plain.mix.weight, fresh.mix.weight)


def test_a_copy_of_a_tapped_layer_is_refused_and_changes_nothing():
    plain, layer, buffers = tapped(PairLayer)
    copied = copy.deepcopy(layer)
    args = inputs(PairLayer)
    arm(buffers, ROWS, 3)
    buffers.ring.fill_(-7)
    with pytest.raises(ValueError, match="a copy of a tapped module has no taps of its own"):
        copied(*args)
    assert bool((buffers.ring == -7).all())
    assert_same_out(layer(*args), plain(*args))
    torch.testing.assert_close(read(buffers, ROWS, 3), streams(PairLayer, plain, args))


def test_tapping_one_layer_leaves_others_of_its_class_alone():
    other = PairLayer()
    tapped(PairLayer)
    assert type(other) is PairLayer
    assert "__call__" not in vars(PairLayer)
    assert "__call__" not in vars(nn.Linear)


# ---------------------------------------------------------------- compiled


class Stack(nn.Module):
    """A pair layer, another, and the sum of the two halves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([PairLayer(), PairLayer()])

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return hidden + residual


@pytest.mark.engine
def test_a_compiled_stack_of_tapped_layers_does_what_the_eager_one_does():
    torch.manual_seed(5)
    model = Stack()
    taps = {(site, layer): 3 * layer + n for layer in (0, 1) for n, (site, _) in enumerate(SITES)}
    buffers = make_buffers(tuple(taps))
    plain = copy.deepcopy(model)
    for index, layer in enumerate(model.layers):
        tap_layer(DecoderLayer(index, layer, PairLayer.convention), taps, buffers)
    positions, hidden = torch.arange(ROWS), torch.randn(ROWS, WIDTH)
    compiled = torch.compile(model, fullgraph=True)

    def run(function, edits):
        buffers.ring.zero_()
        arm(buffers, ROWS, 6, edits)
        with torch.no_grad():
            out = function(positions, hidden.clone())
        return out, read(buffers, ROWS, 6), buffers.tally.clone()

    with torch.no_grad():
        clean = plain(positions, hidden.clone())
    for edits in ({}, {0: 1.0}, {1: -2.0, 5: 3.0}, {2: 0.5, 3: 0.25, 4: 4.0}):
        wanted, found = run(model, edits), run(compiled, edits)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
        assert torch.allclose(found[0], clean) == (not edits)
        assert found[2][:ROWS, layout.CAPTURES].tolist() == [6] * ROWS
        assert found[2][:ROWS, layout.EDITS].tolist() == [len(edits)] * ROWS
        # Where one layer ends the next begins, edits at the seam included.
        seam = sum(value for tap, value in edits.items() if tap == 3)
        torch.testing.assert_close(found[1][:, 3], found[1][:, 2] + seam)
