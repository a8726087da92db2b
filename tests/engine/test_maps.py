"""Affine maps by a whole matrix: beside each other and other edits, by name, and with a cache."""

from typing import Any

import torch
from engine.asking import ask
from support import tiny
from support.cached_pair import SIZE, WHOLE, Pair, fresh
from support.edit_cases import Case, Maker, all_problems
from support.engines import generated, greedy
from support.oracle_edits import At

from midstream import Affine, Capture, Gate, Scale, Steer, TokenIds

PROMPTS = [[5, 17, 33, 101, 8, 77, 54, 23, 9], [150, 44, 12, 13, 99, 180, 64, 3, 70, 71, 120]]
EVEN = list(range(0, tiny.VOCAB, 2))


def matrix(seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    width = tiny.HIDDEN
    return 0.5 * torch.eye(width) + torch.randn(width, width, generator=draw) / width**0.5


def vector(seed: int, size: float = 1.0) -> torch.Tensor:
    return size * torch.randn(tiny.HIDDEN, generator=torch.Generator().manual_seed(seed))


def test_maps_apply_at_their_tokens_beside_each_other_and_other_edits(wide, oracle):
    given = []
    for nth, prompt in enumerate(PROMPTS):
        size = len(prompt)
        maker = Maker(("resid_post", 1), oracle.run(prompt), torch.Generator().manual_seed(nth))
        shift = maker.vector(0.3)
        in_prompt = Affine(matrix=matrix(nth), bias=shift, layer=1, positions="prompt")
        later = Affine(matrix=matrix(5), layer=2, site="attn_out", phase="generated")
        some = Affine(matrix=matrix(2 + nth), layer=0, positions=[1, 4, size + 1], scale=0.7)
        several = Affine(matrix=matrix(4), layer=[0, 2], site=["mlp_out", "resid_mid"])
        named = Affine(matrix=matrix(6), layer=1, positions=TokenIds(EVEN))
        steer, scale = maker.steer(), Scale(0.6, layer=1)
        gated = maker.gate(Affine(matrix=matrix(0), layer=1, norm="keep"))
        is_even = frozenset(
            n for n, one in enumerate([*prompt, *answer(wide, prompt, [named])]) if one in EVEN
        )
        given += [
            Case("prompt", prompt, [At(in_prompt, lambda position, size=size: position < size)]),
            Case("generated", prompt, [At(later, lambda position, size=size: position >= size)]),
            Case("some", prompt, [At(some, frozenset((1, 4, size + 1)).__contains__)]),
            Case("several taps", prompt, [At(several)]),
            Case("by token", prompt, [At(named, is_even.__contains__)]),
            Case("first of three", prompt, [At(gated), At(steer), At(scale)]),
            Case("no map", prompt, [At(steer), At(scale)]),
            Case("plain", prompt, []),
        ]
    found = all_problems(wide, oracle, given, 1e-4, 1e-3)
    assert not found, "\n".join(found)


def answer(llm: Any, prompt: list[int], edits: Any, **asked: Any) -> list[int]:
    """The generated tokens."""
    params = greedy(4, detokenize=False)
    return generated(ask(llm, prompt, params, edits=edits, **asked))


def rows(llm: Any, edits: Any) -> dict[Any, torch.Tensor]:
    """What is at the prompt's tokens in the residual stream of all layers, with these edits."""
    output = ask(llm, PROMPTS[0], 2, edits=edits, capture=Capture("all", positions="prompt"))
    return dict(output.activations.items())


def test_a_name_stands_for_the_matrices_of_its_layers(uncached):
    by_value = [Affine(matrix=matrix(layer), bias=vector(layer), layer=layer) for layer in (0, 2)]
    uncached.vectors.register("act", {layer: matrix(layer) for layer in (0, 2)})
    uncached.vectors.register("shift", {layer: vector(layer) for layer in (0, 2)})
    uncached.vectors.register("edits", {"edits": by_value})
    wanted = rows(uncached, by_value)
    plain = rows(uncached, None)
    for edits in (Affine(matrix="act", bias="shift"), Steer("edits")):
        found = rows(uncached, edits)
        assert all(torch.equal(found[tap], wanted[tap]) for tap in wanted)
    assert all(not torch.equal(wanted[tap], plain[tap]) for tap in wanted)
    only = rows(uncached, Affine(matrix="act", layer=2, bias=vector(2)))
    assert torch.equal(only["resid_post", 1], plain["resid_post", 1])
    uncached.steering.set(base=by_value[0])
    assert torch.equal(rows(uncached, by_value[1])["resid_post", 2], wanted["resid_post", 2])


def test_kv_is_shared_by_requests_with_the_same_matrix_and_by_no_others(wide, uncached):
    pair, prompt = Pair(wide, uncached), fresh(SIZE)
    one, other = matrix(1), matrix(1)
    other[3, 5] += 0.5
    seen = set()
    for edits in (
        None,
        Affine(matrix=one, layer=1),
        Affine(matrix=other, layer=1),
        Affine(matrix=one.T, layer=1),
        Affine(matrix=one, layer=1, bias=1.0),
        Gate(Affine(matrix=one, layer=1), vector(3), threshold=0.1),
    ):
        output = pair.ask(prompt, 0, edits=edits)
        pair.ask(prompt, WHOLE, edits=edits)
        seen.add(tuple(generated(output)))
    assert len(seen) > 2
