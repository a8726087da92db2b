"""Taps on layers of every form: what each site reads and edits, what is refused, compiled."""

import copy

import pytest
import torch
from support.nightly import NIGHTLY
from torch import Tensor, nn
from unit.runtime.worker.taps.branching import (
    KINDS,
    ROWS,
    WIDTH,
    Attention,
    LoneAttention,
    Mix,
    Norm,
    Pair,
    Parallel,
    PostNormAlone,
    Single,
    arm,
    assert_same_out,
    check,
    expect,
    has,
    inputs,
    make_buffers,
    read,
    stream_of,
    tapped,
)

from midstream.errors import TapError, UnsupportedError
from midstream.ops import layout
from midstream.runtime.models.convention import (
    Input,
    Lack,
    LayerConvention,
    Output,
    Returns,
    pair,
    single,
    without_attention,
)
from midstream.runtime.models.decoder import DecoderLayer
from midstream.runtime.worker.taps.taps import tap_layer
from midstream.sites import OUTER

MID, POST = ("resid_mid", 0), ("resid_post", 0)
TAPS = {(site, 0): index for index, site in enumerate(OUTER)}
VALUES = (1.25, 1.75, -0.5, 2.0, 0.75, -1.5, 3.0)


def name(value) -> str:
    return value if isinstance(value, str) else value.__name__


CASES = [(kind, site) for kind in KINDS for site in has(kind)]


@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (1, ROWS, WIDTH)], ids=["TH", "1TH"])
@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_every_site_is_read_and_nothing_is_changed(kind, shape):
    check(kind, {}, shape)
    plain, layer, _ = tapped(kind, tuple((site, 0) for site in has(kind)))
    args = inputs(kind, shape)
    assert_same_out(layer(*(a.clone() for a in args)), plain(*(a.clone() for a in args)))


@pytest.mark.parametrize(("kind", "site"), CASES, ids=name)
def test_an_edit_is_seen_downstream_and_only_there(kind, site):
    check(kind, {site: 2.5})


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_edits_at_all_sites_at_once_add_up_in_the_order_of_the_sites(kind):
    check(kind, dict(zip(has(kind), VALUES, strict=False)))


@pytest.mark.engine
@pytest.mark.parametrize(
    "kind",
    # By day `Pair` is compiled as a stack.
    [pytest.param(kind, marks=() if kind in KINDS[1:3] else pytest.mark.nightly) for kind in KINDS],
    ids=name,
)
def test_the_compiled_layer_does_what_the_eager_one_does(kind):
    torch._dynamo.reset()
    # Inductor takes ten times as long as what comes before it: by day for a stack alone.
    backend = "inductor" if NIGHTLY else "aot_eager"
    compiled = lambda layer: torch.compile(layer, fullgraph=True, backend=backend)  # noqa: E731
    check(kind, dict(zip(has(kind), VALUES, strict=False)), function=compiled)


@pytest.mark.parametrize(("kind", "site"), CASES, ids=name)
def test_each_site_can_be_tapped_alone(kind, site):
    plain, layer, buffers = tapped(kind, ((site, 0),))
    args = inputs(kind)
    arm(buffers, ROWS, 1, {0: 2.5})
    with torch.no_grad():
        out = layer(*(arg.clone() for arg in args))
    wanted, seen = expect(kind, plain, args, {site: 2.5})
    torch.testing.assert_close(stream_of(kind, out), wanted)
    torch.testing.assert_close(read(buffers, ROWS, 1)[:, 0], seen[:, has(kind).index(site)])


@pytest.mark.parametrize("kind", [Parallel, PostNormAlone], ids=name)
@pytest.mark.parametrize("branch", ["mlp", "attn"])
def test_a_shared_input_is_copied_only_where_it_is_tapped(kind, branch):
    _, layer, _held = tapped(kind, ((f"{branch}_in", 0),))
    _, other, _held_too = tapped(kind, ((f"{branch}_out", 0),))
    given = []
    for each in (layer, other):
        module = each.mlp if branch == "mlp" else each.self_attn
        module.linear.register_forward_pre_hook(lambda _m, args: given.append(args[0]))
        x = torch.randn(ROWS, WIDTH)
        each.mlp(x) if branch == "mlp" else module(torch.zeros(()), x)
        given[-1] = given[-1].data_ptr() == x.data_ptr()
    assert given == [False, True]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_what_attention_reads_is_found_by_the_name_of_its_parameter(by_keyword):
    plain, layer, buffers = tapped(Parallel, (("attn_in", 0),))
    arm(buffers, ROWS, 1, {0: 2.5})
    positions, x = torch.zeros(()), torch.randn(ROWS, WIDTH)
    before = x.clone()
    if by_keyword:
        out = layer.self_attn(hidden_states=x, positions=positions)
    else:
        out = layer.self_attn(positions, x)
    torch.testing.assert_close(out, plain.self_attn(positions, x + 2.5))
    assert torch.equal(x, before), "others read this tensor too"
    torch.testing.assert_close(read(buffers, ROWS, 1)[:, 0], x + 2.5)


def test_attention_is_swapped_only_where_what_it_reads_is_tapped():
    for site, name in (("attn_in", "TappedAttention"), ("mlp_in", "Attention")):
        _, layer, _ = tapped(Pair, ((site, 0),))
        assert type(layer.self_attn).__name__ == name
        assert type(layer) is Pair


def test_a_layer_is_swapped_only_for_the_sites_at_its_own_entry_and_exit():
    _, layer, _ = tapped(Single, (("mlp_out", 0), ("attn_out", 0)))
    assert type(layer) is Single
    _, layer, _ = tapped(Pair, (("mlp_out", 0),))
    assert type(layer).__name__ == "TappedPair"
    assert (type(layer.mlp), type(layer.self_attn)) == (Mix, Attention)
    _, layer, _ = tapped(LoneAttention, (("attn_out", 0),))
    assert type(layer).__name__ == "TappedLoneAttention"


def test_a_module_of_two_names_is_tapped_once():
    """As Kimi's experts, which are `mlp` and `block_sparse_moe`."""

    class Twice(Single):
        convention = single("norm", mlp="mlp", mlp_out="again")

        def __init__(self):
            super().__init__()
            self.again = self.mlp

    check(Twice, {"mlp_in": 1.0, "mlp_out": 2.0})


@pytest.mark.parametrize(
    ("convention", "message"),
    [
        (single("norm", mlp="moe"), "Single has no module 'moe', where its convention has mlp_in"),
        (single("norm", attn="attn"), "no module 'attn', where its convention has attn_out"),
        (single("norm", mlp_out="mlp.down"), "no module 'mlp.down', where its convention has"),
        (single("norm", attn="mlp"), "mlp_out and another site are both the output of 'mlp'"),
        (single("norm", attention="attn"), "no module 'attn', where its convention has attn_in"),
        (
            single("norm", attention=Input("self_attn", parameter="x")),
            r"Attention.forward has no parameter 'x'; it has positions, hidden_states",
        ),
        (
            single("norm", attention="mlp", attn="self_attn"),
            "mlp_in and another site are both the input of 'mlp'",
        ),
        (LayerConvention(Returns.SINGLE, hidden="x", mid="norm"), "no parameter 'x'; it has pos"),
        (LayerConvention(Returns.PAIR, residual="skip", mid="norm"), "no parameter 'skip'"),
        (LayerConvention(Returns.SINGLE, mid="ln_2"), "no module 'ln_2', where its convention has"),
        (LayerConvention(Returns.SINGLE, mid="norm.inner"), "has no module 'norm.inner'"),
        (LayerConvention(Returns.SINGLE, mid="forward"), "has no module 'forward'"),
    ],
)
def test_a_layer_that_is_not_as_its_convention_says_is_refused(convention, message):
    taps = {(site, 0): n for n, site in enumerate(OUTER)}
    with pytest.raises(UnsupportedError, match=message):
        tap_layer(DecoderLayer(0, Single(), convention), taps, make_buffers(taps))


class Wrong(nn.Module):
    """A module that is called by keyword and returns no tensor first."""

    def forward(self, x: Tensor | None = None, hidden_states: Tensor | None = None):
        return [x]


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ("mlp_in", r"called with or returned a tuple of 0: \(\); expected a tensor first"),
        ("attn_in", r"called with or returned a tuple of 1: \(NoneType\); expected a tensor"),
        ("mlp_out", r"TappedWrong was called with or returned a tuple of 1: \(list\)"),
    ],
)
def test_a_module_that_is_not_called_as_expected_is_an_error_and_not_a_guess(site, message):
    layer = Single()
    layer.mlp = layer.self_attn = Wrong()
    tap_layer(DecoderLayer(0, layer, Single.convention), {(site, 0): 0}, make_buffers([(site, 0)]))
    with pytest.raises(TapError, match=message):
        layer.mlp(x=torch.zeros(ROWS, WIDTH))


def test_what_is_not_said_of_a_convention_is_lacking_by_name():
    convention = LayerConvention(Returns.SINGLE, mid="norm")
    for site in ("attn_in", "attn_out", "mlp_in", "mlp_out"):
        assert "does not know where" in (convention.lack(site) or "")
    assert convention.lack("resid_mid") is None
    assert single("norm", mlp=Input("mlp")).branches["mlp_out"] == Output("mlp")
    assert single("norm", attention="attn").branches["attn_out"] == Output("attn")


def test_attention_has_a_copy_where_the_mlp_has_one():
    for shared in (False, True):
        place = Input("self_attn", shared, parameter="hidden_states")
        assert single("norm", mlp=Input("mlp", shared)).attn_in == place
        assert pair("norm", mlp=Input("mlp", shared)).attn_in == place


def test_without_attention_both_of_its_sites_are_lacking_for_one_reason():
    for convention in (
        pair("norm", attention=Lack("it is Mamba")),
        single("norm", attention=Lack("it is Mamba")),
        without_attention(single("norm"), "it is Mamba"),
    ):
        assert convention.lack("attn_in") == convention.lack("attn_out") == "it is Mamba"
        assert convention.lack("mlp_in") is None


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
