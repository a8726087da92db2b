"""Taps on the branches: `attn_in`, `attn_out`, `mlp_in`, `mlp_out`, in every form of layer."""

from __future__ import annotations

import pytest
import torch
from support.nightly import NIGHTLY
from support.tapping import ROWS, WIDTH, arm, assert_same_out, make_buffers, read, tapped
from torch import Tensor, nn
from unit.runtime.worker.taps.branching import (
    KINDS,
    Attention,
    LoneAttention,
    Mix,
    Pair,
    Parallel,
    PostNormAlone,
    Single,
    check,
    expect,
    has,
    inputs,
    stream_of,
)

from midstream.errors import TapError, UnsupportedError
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
    [*KINDS[:3], *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS[3:])],
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
