"""Gemma 3n, whose layers take and return four streams: rows and edits of each, against hooks on
vLLM's own modules.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.engines import engine, generated, greedy, tokens
from torch import Tensor

from midstream import Ablate, Capture, Lens, Probe, Replace, Steer
from midstream.errors import SpecError
from midstream.sites import OUTER

PROMPT = [1, 5, 9, 33, 77, 100, 12, 8]
COUNT = 3
STREAMS = 4
ENDS = ("resid_pre", "resid_post")
EVERY = Capture("all", list(OUTER))
VECTOR = 3 * torch.randn(tiny.HIDDEN, generator=torch.Generator().manual_seed(3))


class Hooks:
    """Rows [T, streams, H] by (site, layer) of a request on vLLM's own modules, and a change."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.rows: dict[tuple[str, int], list[Tensor]] = {}
        llm.generate(tokens(PROMPT), greedy(1), use_tqdm=False)
        self.layers = llm.apply_model(lambda model: list(model.model.layers))[0]

    def run(self, site: str = "", layer: int = 0, stream: int = 0, change: Any = None) -> Any:
        def meet(name: str, index: int, streams: Tensor) -> None:
            if (name, index) == (site, layer):
                streams[stream] = change(streams[stream].cpu()).to(streams.device)
            self.rows.setdefault((name, index), []).append(streams.transpose(0, 1).cpu().clone())

        def entry(index: int) -> Any:
            return lambda _module, _args, named: meet("resid_pre", index, named["hidden_states"])

        def leaving(index: int) -> Any:
            return lambda _module, _args, out: meet("resid_post", index, out)

        self.rows, handles = {}, []
        for index, module in enumerate(self.layers):
            handles.append(module.register_forward_pre_hook(entry(index), with_kwargs=True))
            handles.append(module.register_forward_hook(leaving(index)))
        try:
            return self.llm.generate(tokens(PROMPT), greedy(COUNT), use_tqdm=False)[0]
        finally:
            for handle in handles:
                handle.remove()

    def differences(self, output: Any) -> list[str]:
        return [
            f"{tap}: {float((output.activations[tap] - torch.cat(parts)).abs().max())}"
            for tap, parts in self.rows.items()
            if not torch.equal(output.activations[tap], torch.cat(parts))
        ]


@pytest.fixture(scope="module")
def model(tiny_models: Path) -> Path:
    return tiny.make("gemma3n", tiny_models, tiny.GEMMA3N)


@pytest.fixture(scope="module")
def hooks(model: Path) -> Iterator[Hooks]:
    with engine(model, midstream={"sites": list(OUTER)}, enable_prefix_caching=False) as llm:
        yield Hooks(llm)


def ask(llm: Any, **plan: Any) -> Any:
    return llm.generate(tokens(PROMPT), greedy(COUNT), use_tqdm=False, **plan)[0]


def test_rows_are_those_of_all_streams(hooks):
    plain = hooks.run()
    output = ask(hooks.llm, capture=[EVERY])
    assert generated(output) == generated(plain)
    assert len(hooks.rows) == 2 * tiny.LAYERS
    assert not hooks.differences(output)
    rows = output.activations["resid_post", 1]
    assert rows.shape == (len(PROMPT) + COUNT - 1, STREAMS, tiny.HIDDEN)
    one = ask(hooks.llm, capture=[Capture([1], ["resid_post"], heads=[2])])
    assert torch.equal(one.activations["resid_post", 1], rows[:, 2:3])
    assert hooks.llm.sites()["resid_post", 1].shape == "4 streams of 64"


def test_halfway_a_layer_has_one_stream(hooks):
    seen: list[Tensor] = []
    norms = [layer.pre_feedforward_layernorm for layer in hooks.layers]
    handles = [
        norm.register_forward_pre_hook(lambda _module, args: seen.append(args[0].clone()))
        for norm in norms
    ]
    ask(hooks.llm)
    for handle in handles:
        handle.remove()
    rows = ask(hooks.llm, capture=[EVERY]).activations
    for index, wanted in enumerate(seen[: tiny.LAYERS]):
        assert torch.equal(rows["resid_mid", index][: len(PROMPT)], wanted.cpu())


@pytest.mark.parametrize(
    ("site", "layer", "stream"),
    [
        (site, layer, stream)
        if (nth + layer) % 2 == stream // 2
        else pytest.param(site, layer, stream, marks=pytest.mark.nightly)
        for nth, site in enumerate(ENDS)
        for layer in range(tiny.LAYERS)
        for stream in (0, 2)
    ],
)
def test_an_edit_of_one_stream_is_a_hook_there(hooks, site, layer, stream):
    edits = {
        "steer": (Steer(VECTOR, layer=layer, site=site, head=stream), lambda rows: rows + VECTOR),
        "replace": (
            Replace(VECTOR, layer=layer, site=site, head=stream),
            lambda rows: VECTOR.expand_as(rows),
        ),
    }
    plain = ask(hooks.llm, capture=[EVERY]).activations["resid_post", tiny.LAYERS - 1]
    for edit, change in edits.values():
        wanted = hooks.run(site, layer, stream, change)
        output = ask(hooks.llm, capture=[EVERY], edits=[edit])
        assert generated(output) == generated(wanted)
        for tap, parts in hooks.rows.items():
            torch.testing.assert_close(output.activations[tap], torch.cat(parts))
        last = output.activations["resid_post", tiny.LAYERS - 1]
        assert float((last - plain).abs().max()) > 0.1


def test_probes_read_one_stream_and_ablations_change_no_other(hooks):
    probe = Probe(VECTOR, layer=1, head=3)
    rows = ask(hooks.llm, capture=[EVERY]).activations["resid_post", 1]
    output = ask(hooks.llm, probes=[probe])
    torch.testing.assert_close(output.probes["probe"], rows[:, 3] @ VECTOR)
    edited = ask(hooks.llm, capture=[EVERY], edits=[Ablate(VECTOR, layer=1, head=3)])
    change = (edited.activations["resid_post", 1] - rows)[: len(PROMPT)].abs().amax((0, 2))
    assert change[:3].tolist() == [0, 0, 0]
    assert float(change[3]) > 0


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ({"edits": [Steer(VECTOR, layer=1)]}, "expected 256 .*4 streams of 64, got 64"),
        ({"edits": [Steer(VECTOR, layer=1, head=4)]}, "head 4 is out of range"),
        ({"probes": [Probe(VECTOR, layer=1)]}, "expected 256 .*4 streams of 64, got 64"),
        ({"capture": [Lens([1])]}, "the stream cannot be decoded"),
    ],
)
def test_what_reads_one_stream_says_so(hooks, plan, problem):
    with pytest.raises(SpecError, match=problem):
        ask(hooks.llm, **plan)


def test_compiled_layers_give_the_rows_and_the_edits_of_eager_ones(model, hooks):
    plan = {"capture": [EVERY], "edits": [Steer(VECTOR, layer=0, site="resid_post", head=1)]}
    wanted = ask(hooks.llm, **plan)
    settings = {"midstream": {"sites": list(OUTER)}, "enable_prefix_caching": False}
    with engine(model, enforce_eager=False, **settings) as llm:
        output = ask(llm, **plan)
    assert generated(output) == generated(wanted)
    for tap, rows in wanted.activations.items():
        torch.testing.assert_close(output.activations[tap], rows, rtol=1e-4, atol=1e-4)
