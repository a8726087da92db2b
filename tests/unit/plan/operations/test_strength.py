"""Edits with a multiple of their strength."""

import pytest

from midstream import Ablate, Affine, Bias, Clamp, Gate, Replace, Route, Scale, Steer
from midstream.errors import SpecError
from midstream.plan.operations.strength import with_strength

V = [1.0, 2.0]
READ = {"direction": V, "layer": 0}


def test_each_kind_multiplies_what_its_formula_calls_strength():
    edits = [
        Steer(V, 1, 3.0),
        Ablate([V], 1, 0.5),
        Clamp(V, 1, 2.0, strength=0.5),
        Replace([V], 1, 0.25),
        Affine([V], [V], 1, scale=2.0),
        Bias({7: 4.0}),
        Gate(Steer(V, 1, 3.0), READ, 0.5),
    ]
    expected = [
        Steer(V, 1, 6.0),
        Ablate([V], 1, 1.0),
        Clamp(V, 1, 2.0, strength=1.0),
        Replace([V], 1, 0.5),
        Affine([V], [V], 1, scale=4.0),
        Bias({7: 8.0}),
        Gate(Steer(V, 1, 6.0), READ, 0.5),
    ]
    assert with_strength(edits, 2.0) == tuple(expected)
    assert with_strength(edits, 1.0) == tuple(edits)
    assert with_strength(edits, 0.0) == ()


def test_what_has_no_strength_says_so_but_can_be_off():
    for edit in (Scale(2.0, 1), Route(1, layer=1), Gate(Scale(2.0, 1), READ)):
        edits = [Steer(V, 1), edit]
        with pytest.raises(SpecError, match=r"edits\[1\] is a (Scale|Route)") as caught:
            with_strength(edits, 0.5)
        assert caught.value.path == "scale"
        assert with_strength(edits, 1.0) == tuple(edits)
        assert with_strength(edits, 0.0) == ()


def test_a_gate_with_memory_goes_on_to_read_where_it_is_off():
    gate = Gate(Steer(V, 1, 3.0), READ, 0.5, hold="rest", release=0.25)
    assert with_strength([gate], 0.0) == (
        Gate(Steer(V, 1, 0.0), READ, 0.5, hold="rest", release=0.25),
    )
