"""Sums of the stream in a trial run: those that layers claim hold, or the engine does not start."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from unit.runtime.worker.taps.branching import WIDTH, Pair, Parallel, Single

from midstream.errors import TapError, UnsupportedError
from midstream.ops.site import bind
from midstream.runtime.models.convention import LONE_MIXER, Lack, LayerConvention, single
from midstream.runtime.models.decoder import DecoderLayer
from midstream.runtime.protocol.segments import Room
from midstream.runtime.worker.tables.device_buffers import Buffers, BufferSizes
from midstream.runtime.worker.taps.sum_check import check_model
from midstream.runtime.worker.taps.taps import tap_layer
from midstream.sites import Tap

SITES = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
LAYERS = 3


class Mixer(Single):
    """A layer with an MLP alone."""

    convention = single(no_mid=LONE_MIXER, attention=Lack("it has no attention"))

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        return hidden_states + self._mlp(hidden_states)


KINDS = (Pair, Single, Parallel, Mixer)


class Trunk:
    """Three tapped layers, their buffers, and a trial run that begins with a zero stream."""

    def __init__(
        self,
        kind: Callable[[], Any],
        convention: LayerConvention | None = None,
        dtype: torch.dtype = torch.float32,
        ring_rows: int = 64,
        bank_rows: int = 16,
        max_edits: int = 16,
        narrow: Mapping[Tap, int] | None = None,
        change: Callable[[list[Any]], None] = lambda layers: None,
    ) -> None:
        torch.manual_seed(5)
        modules = [kind().to(dtype) for _ in range(LAYERS)]
        change(modules)
        self.layers = [
            DecoderLayer(number, module, convention or module.convention)
            for number, module in enumerate(modules)
        ]
        sites = [site for site in SITES if self.layers[0].convention.lack(site) is None]
        found = [(site, number) for number in range(LAYERS) for site in sites]
        widths = {**(narrow or {}), **dict.fromkeys(found, WIDTH)}
        self.taps: dict[Tap, int] = {tap: index for index, tap in enumerate(widths)}
        self.narrow = narrow or {}
        self.buffers = Buffers.allocate(
            widths,
            BufferSizes(
                max_tokens=16, hidden_size=WIDTH, ring_rows=ring_rows,
                room=Room(
                    bank_rows=bank_rows, programs=16, max_edits=max_edits, token_ids=1, probes=1
                ),
            ),
            dtype=dtype, device=torch.device("cpu"),
        )  # fmt: skip
        self.runs = 0
        self.between: Callable[[Tensor], Tensor] = lambda hidden: hidden
        for tap, width in self.narrow.items():
            bind(self.buffers.table[self.taps[tap]], self.buffers, width)
        for layer in self.layers:
            tap_layer(layer, self.taps, self.buffers)

    def run(self) -> None:
        self.runs += 1
        for tap, width in self.narrow.items():
            rows = torch.zeros(1, width, dtype=self.buffers.ring.dtype)
            table = self.buffers.table[self.taps[tap]]
            torch.ops.midstream.site(rows, None, table, self.buffers.tally)
        hidden = torch.zeros(1, WIDTH, dtype=self.buffers.ring.dtype)
        residual = None
        with torch.no_grad():
            for layer in self.layers:
                if layer.convention.residual is None:
                    hidden = self.between(layer.module(None, hidden))
                else:
                    hidden, residual = layer.module(None, hidden, residual)
                    hidden = self.between(hidden)

    def check(self) -> None:
        check_model(self.buffers, self.layers, self.taps, self.run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_whose_sums_hold_starts(kind, dtype):
    Trunk(kind, dtype=dtype).check()


def _changes(module: Any, change: Callable[..., Any]) -> None:
    """Let a module do something else with what its own forward does."""
    module.forward = functools.partial(change, module.forward)


def _scales_skip(layers: list[Any]) -> None:
    _changes(layers[1].norm, lambda forward, hidden, residual: forward(hidden, residual * 1.1))


def _scales_sum(layers: list[Any]) -> None:
    _changes(layers[1], lambda forward, *args: forward(*args) * 1.1)


def _is_not_finite(layers: list[Any]) -> None:
    _changes(layers[2], lambda forward, *args: forward(*args) * torch.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (Pair, _scales_skip, "resid_mid of layer 1 [+] mlp_out .* not resid_post of layer 1"),
        (Single, _scales_sum, "resid_mid of layer 1 [+] mlp_out .* not resid_post of layer 1"),
        (Parallel, _scales_sum, "resid_pre .* attn_out .* mlp_out .* resid_post of layer 1"),
        (Mixer, _scales_sum, "resid_pre of layer 1 [+] mlp_out .* resid_post of layer 1"),
        (Single, _is_not_finite, "is not resid_post of layer 2"),
    ],
)
def test_a_sum_that_does_not_hold_is_refused_by_layer_and_site(kind, change, message, dtype):
    with pytest.raises(UnsupportedError, match=message):
        Trunk(kind, dtype=dtype, change=change).check()


@pytest.mark.parametrize("kind", [Pair, Single])
def test_a_stream_that_changes_between_layers_is_refused(kind):
    trunk = Trunk(kind)
    trunk.between = lambda hidden: hidden + 0.5
    with pytest.raises(UnsupportedError, match="resid_post of layer 0 is not resid_pre of layer 1"):
        trunk.check()


def test_sums_that_a_convention_does_not_claim_are_not_compared():
    convention = replace(Single.convention, unsummed=("resid_post", "resid_pre"))
    trunk = Trunk(Single, convention, change=_scales_sum)
    trunk.between = lambda hidden: hidden + 0.5
    trunk.check()


HALF: dict[Tap, int] = {("k", 0): WIDTH // 2}  # as the keys of grouped heads are


@pytest.mark.parametrize(
    "sizes",
    [
        # Rows that do not fit in the ring together take several runs.
        *({"ring_rows": rows} for rows in (3, 5, 7)),
        {"bank_rows": 1},
        {"max_edits": 1},
        {"bank_rows": 3},
        {"max_edits": 7},
        # The first tap is narrower than the stream.
        {"narrow": HALF, "bank_rows": 1},
        {"narrow": HALF},
    ],
)
def test_little_room_is_enough_for_a_check(sizes):
    trunk = Trunk(Pair, **sizes)
    trunk.check()
    assert (trunk.runs == 2) == ("ring_rows" not in sizes)
    with pytest.raises(UnsupportedError, match="resid_post of layer 1, a Pair"):
        Trunk(Pair, **sizes, change=_scales_skip).check()


def test_a_check_leaves_the_buffers_as_they_were():
    trunk = Trunk(Pair)
    for tensor in (trunk.buffers.table, trunk.buffers.instructions, trunk.buffers.params):
        tensor.random_(0, 2)
    trunk.buffers.table[:, :, 1] = 0
    trunk.buffers.table[:, 0, 3] = torch.arange(1, len(trunk.taps) + 1)
    trunk.buffers.bank.normal_()
    names = ("table", "instructions", "params", "bank", "tokens")
    before = {name: getattr(trunk.buffers, name).clone() for name in names}
    with pytest.raises(TapError):  # its codes are others
        trunk.check()
    trunk.buffers.table[:, 0, 3] = Trunk(Pair).buffers.table[:, 0, 3]
    before["table"] = trunk.buffers.table.clone()
    trunk.check()
    for name in names:
        assert torch.equal(getattr(trunk.buffers, name), before[name]), name


@pytest.mark.parametrize("kind", [Pair, Single])
def test_what_branches_return_in_a_trial_does_not_matter(kind):
    """Attention does not run in vLLM's trial runs: what it returns is whatever memory had."""

    def change(layers: list[Any]) -> None:
        for layer in layers:
            layer.self_attn.linear.bias.data.fill_(torch.nan)
            layer.mlp.linear.bias.data.fill_(3e38)

    Trunk(kind, change=change).check()
