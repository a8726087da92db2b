"""Texts of operations and captures: the call that makes them, short whatever they hold."""

import pytest
import torch

from midstream import SAE, Bias, Capture, Features, Gate, Probe, Replace, Scale, Steer
from midstream.lenses import JacobianLens
from midstream.plan import Mass, Reading

V = torch.tensor([3.0, 4.0])
SHOWN = f"Vector(size=2, norm=5, digest='{Steer(V, 0).vector.digest[:8]}')"


def test_a_text_is_the_call_without_what_is_the_default() -> None:
    for one, text in (
        (Capture([5, 6]), "Capture(layers=[5, 6])"),
        (Capture(1, sink="store", tag="a"), "Capture(layers=[1], sink='store', tag='a')"),
        (Features("a", 8, layer=2), "Features(sae='a', top=8, layer=2)"),
        (Steer(V, layer=14, scale=4), f"Steer(vector={SHOWN}, scale=4.0, layer=14)"),
        (
            Steer(rows=torch.ones(40, 8), layer=1, positions=slice(0, 40), norm="match"),
            "Steer(rows=[40 vectors of 8], norm='match', layer=1, positions=[{slice: [0, 40, 1]}])",
        ),
        (
            Steer({0: V, 3: V, 5: V}, site="resid_mid", phase="generated"),
            "Steer(vector=[3 vectors of 2], layer=[0, 3, 5], site='resid_mid', phase='generated')",
        ),
        (Bias({7: 2.0}), "Bias(tokens={7: 2.0}, positions=['last_prompt', 'generated'])"),
        (Scale(2, 1, site="z", head=3), "Scale(factor=2.0, layer=1, site='z', head=3)"),
        (Replace(V, 1, exclude=[0]), f"Replace(rows=[{SHOWN}], layer=1, exclude=[0])"),
        (Probe(V, 3, bias=1, name="x"), f"Probe(direction={SHOWN}, bias=1.0, name='x', layer=3)"),
        (Gate(Scale(0, 2), Reading("a"), 1.5), "Gate(edit=Scale(factor=0.0, layer=2), probe="),
        (
            JacobianLens({nth: torch.eye(3) for nth in range(4)}),
            "JacobianLens(4 maps of the stream, 3 wide, after 1 to 4 layers)",
        ),
        (
            JacobianLens({0: torch.eye(3), 7: torch.eye(3)}),
            "JacobianLens(2 maps of the stream, 3 wide, after 1, 8 layers)",
        ),
        (
            SAE(torch.zeros(8, 4), torch.zeros(4), torch.zeros(4, 8), torch.zeros(8),
                torch.ones(4), False, hook_name="blocks.1.hook_resid_post"),
            "<JumpReLU SAE of blocks.1.hook_resid_post: 4 features, width 8>",
        ),
        (
            SAE(torch.zeros(8, 4), torch.zeros(4), torch.zeros(4, 8), torch.zeros(8),
                None, False, top_k=2, is_transcoder=True),
            "<TopK(2) transcoder: 4 features, width 8>",
        ),
    ):  # fmt: skip
        assert repr(one).startswith(text), one
        assert isinstance(one, Gate) or repr(one) == text


@pytest.mark.parametrize(
    "one",
    [
        Bias(dict.fromkeys(range(200), 1.0)),
        Replace(torch.ones(300, 8), 1, positions=slice(0, 300)),
        Capture("all", positions=list(range(0, 900, 3))),
        Probe(name="x", layer=1, attention=Mass(slice(0, 4))),
    ],
    ids=["bias", "replace", "capture", "probe"],
)
def test_a_text_is_short_whatever_is_in_it(one: object) -> None:
    assert len(repr(one)) < 240
