"""Where the maps of registered lenses are in the workers' memory, and who may take it."""

from typing import Any

import pytest
import torch

from midstream.errors import BusyError, SpecError
from midstream.lenses import JacobianLens, TunedLens
from midstream.plan import ModelShape
from midstream.plan.resolved import LensMap
from midstream.runtime.frontend.lens_registry import LensRegistry
from midstream.runtime.frontend.weight_memory import WeightMemory

WIDTH, LAYERS = 4, 3
MAP = 4 * WIDTH * WIDTH  # bytes


class Fixture:
    def __init__(self, nbytes: int) -> None:
        self.memory = bytearray(nbytes)
        self.used: set[str] = set()
        self.changes = 0
        shape = ModelShape(LAYERS, WIDTH, [("resid_post", 0)])
        memory = WeightMemory(nbytes, lambda read: read[1] in self.used, self.change)
        self.registry = LensRegistry(memory, shape)

    def change(self) -> None:
        self.changes += 1

    def register(self, name: str, lens: Any) -> None:
        with self.registry.adding(name, lens) as messages:
            for one in messages:
                self.memory[one.offset : one.offset + len(one.data)] = one.data

    def at(self, number: int, count: int) -> torch.Tensor:
        return torch.frombuffer(self.memory, dtype=torch.float32)[number : number + count]


def jacobian(*layers: int, seed: int = 0) -> JacobianLens:
    draw = torch.Generator().manual_seed(seed)
    return JacobianLens({one: torch.randn(WIDTH, WIDTH, generator=draw) for one in layers})


def test_maps_are_where_requests_are_told() -> None:
    engine = Fixture(10 * MAP)
    one = jacobian(0, 1)
    weights = {nth: torch.randn(WIDTH, WIDTH).double() for nth in range(3)}
    tuned = TunedLens(weights, {nth: torch.randn(WIDTH) for nth in range(3)})
    engine.register("j", one)
    engine.register("t", tuned)
    assert engine.registry.names == ("j", "t")
    first, last = engine.registry.maps_of("j", [2, 3])
    assert torch.equal(engine.at(first.matrix, 16).view(4, 4), one.matrices[2])
    assert (first.adds, first.bias, last) == (False, -1, LensMap())
    for nth, found in enumerate(engine.registry.maps_of("t", [0, 1, 2])):
        assert found.adds
        assert torch.equal(engine.at(found.matrix, 16).view(4, 4), weights[nth].float())
        assert torch.equal(engine.at(found.bias, 4), tuned.biases[nth])


def test_memory_of_a_lens_that_is_gone_is_taken_again() -> None:
    engine = Fixture(3 * MAP)
    engine.register("a", jacobian(0))
    engine.register("b", jacobian(0))
    engine.register("c", jacobian(0))
    with pytest.raises(SpecError, match="take 64 bytes, .* readout_bytes is 192, of which 192"):
        engine.register("d", jacobian(0))
    engine.registry.remove("b")
    with pytest.raises(SpecError, match="take 128 bytes"):
        engine.register("d", jacobian(0, 1))
    engine.register("d", jacobian(0, seed=5))
    (found,) = engine.registry.maps_of("d", [1])
    assert found.matrix == 16
    # In its own place, if it is large enough.
    engine.register("d", jacobian(0, seed=6))
    assert engine.registry.maps_of("d", [1]) == (found,)
    assert torch.equal(engine.at(16, 16).view(4, 4), jacobian(0, seed=6).matrices[1])
    with pytest.raises(SpecError, match=r"setting readout_bytes is 0, of which 0"):
        Fixture(0).register("a", jacobian(0))


def test_a_lens_stays_while_requests_use_it() -> None:
    engine = Fixture(3 * MAP)
    engine.register("a", jacobian(0))
    engine.used.add("a")
    for change in (lambda: engine.registry.remove("a"), lambda: engine.register("a", jacobian(1))):
        with pytest.raises(BusyError, match="running requests use the lens 'a'"):
            change()
    assert engine.registry.maps_of("a", [1])
    engine.used.clear()
    changes = engine.changes
    engine.registry.remove("a")
    assert engine.changes > changes
    with pytest.raises(SpecError, match="there is no lens 'a'"):
        engine.registry.remove("a")


def test_a_lens_that_was_not_written_is_not_there() -> None:
    engine = Fixture(3 * MAP)
    engine.register("a", jacobian(0))
    with pytest.raises(RuntimeError), engine.registry.adding("a", jacobian(0, 1)):
        raise RuntimeError
    assert engine.registry.names == ()
    engine.register("b", jacobian(0, 1, 2))


@pytest.mark.parametrize(
    ("name", "lens", "problem"),
    [
        ("logit", jacobian(0), "name: 'logit' is the lens without maps"),
        ("a b", jacobian(0), "name: .*characters"),
        ("a", JacobianLens({0: torch.zeros(8, 8)}), "lens: it is 8 wide, and the model 4"),
        ("a", jacobian(3), "the model has 3 layers"),
        ("a", "folder", "expected a TunedLens or a JacobianLens, got `str`"),
    ],
)
def test_what_is_no_lens_of_the_model_is_refused(name: str, lens: Any, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        Fixture(9 * MAP).register(name, lens)


def test_a_request_must_name_a_lens_with_a_map_of_its_layers() -> None:
    engine = Fixture(9 * MAP)
    engine.register("a", jacobian(0, 1))
    with pytest.raises(SpecError, match=r"no lens 'b'; there is 'logit', 'a'; register it") as no:
        engine.registry.maps_of("b", [1])
    assert no.value.path == "kind"
    with pytest.raises(
        SpecError, match="'a' has no map of the stream after 0 layers; it has"
    ) as no:
        engine.registry.maps_of("a", [1, 0])
    assert no.value.path == "layers"
