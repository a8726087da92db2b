"""A drafter that runs what is tapped is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from midstream.errors import UnsupportedError
from midstream.runtime.drafters import check_drafter
from midstream.runtime.taps import TappedLayer, TappedModule


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(2, 2)


def tapped(module, base):
    module.__class__ = type("Tapped", (base, type(module)), {})
    return module


class Drafter(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.layers = nn.ModuleList(parts)


@pytest.mark.parametrize("name", ["drafter", "speculator"])
@pytest.mark.parametrize("part", ["layers.1", "layers.1.mlp"])
def test_a_tapped_layer_or_part_of_one_is_refused_by_name(name, part):
    model = Drafter(Layer(), Layer())
    base = TappedLayer if part == "layers.1" else TappedModule
    tapped(model.get_submodule(part), base)
    for one in (model, SimpleNamespace(unwrap=lambda: model)):
        with pytest.raises(UnsupportedError, match=f"a Drafter, shares its {part} with the model"):
            check_drafter(SimpleNamespace(**{name: SimpleNamespace(model=one)}))


def test_a_drafter_with_layers_of_its_own_passes():
    model = Drafter(Layer(), nn.Embedding(2, 2))
    check_drafter(SimpleNamespace(drafter=SimpleNamespace(model=model)))


@pytest.mark.parametrize(
    "runner",
    [SimpleNamespace(), SimpleNamespace(drafter=object()), SimpleNamespace(speculator=None)],
)
def test_where_no_model_drafts_there_is_nothing_to_share(runner):
    check_drafter(runner)
