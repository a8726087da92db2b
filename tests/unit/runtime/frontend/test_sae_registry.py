"""Where the encoders of registered SAEs are in the workers' memory, beside lenses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.sae_oracle import RandomSae

from midstream import SAE
from midstream.errors import BusyError, ConfigError, SpecError
from midstream.lenses import JacobianLens
from midstream.plan import ModelShape
from midstream.runtime.frontend.lens_registry import LensRegistry
from midstream.runtime.frontend.sae_registry import SaeRegistry
from midstream.runtime.frontend.weight_memory import WeightMemory
from midstream.runtime.worker.readouts.rank_weights import RankWeights
from midstream.runtime.worker.readouts.sae import SaeReader

WIDTH, FEATURES = 6, 40
ONE = 4 * FEATURES * (WIDTH + 2)


class Fixture:
    def __init__(self, nbytes: int) -> None:
        self.used: set[tuple[str, str]] = set()
        shape = ModelShape(3, WIDTH, [("resid_post", 0)], dtype="bfloat16")
        memory = WeightMemory(nbytes, self.used.__contains__, lambda: None)
        self.saes, self.lenses = SaeRegistry(memory, shape), LensRegistry(memory, shape)
        self.weights = RankWeights(nbytes, torch.device("cpu"))

    def register(self, registry: SaeRegistry | LensRegistry, name: str, weights: object) -> None:
        with registry.adding(name, weights) as messages:  # type: ignore[arg-type]
            for one in messages:
                self.weights.write(one.offset, one.data)


def sae(kind: str, folder: Path) -> tuple[RandomSae, SAE]:
    given = RandomSae(kind, WIDTH, FEATURES, "blocks.2.hook_resid_post")
    return given, SAE.load(given.write(folder / kind))


def test_where_the_model_has_several_streams_no_sae_reconstructs_them() -> None:
    tap = ("resid_post", 0)
    shape = ModelShape(3, WIDTH, [tap], widths={tap: 4 * WIDTH}, heads={tap: 4})
    memory = WeightMemory(ONE, set[Any]().__contains__, lambda: None)
    with pytest.raises(ConfigError, match=r"one stream, and resid_post:0 has 4"):
        SaeRegistry(memory, shape, {tap: FEATURES})


def test_encoders_are_read_where_they_were_written_beside_lenses(tmp_path: Path) -> None:
    engine = Fixture(4 * ONE)
    draw = torch.randn(WIDTH, WIDTH)
    made = {kind: sae(kind, tmp_path) for kind in ("gated", "topk")}
    # Of an odd number of bytes, as far as float32 is concerned.
    engine.register(engine.lenses, "gated", JacobianLens({0: draw}))
    for kind, (_, loaded) in made.items():
        engine.register(engine.saes, kind, loaded)
    engine.register(engine.lenses, "other", JacobianLens({1: draw}))
    assert (engine.saes.names, engine.lenses.names) == (("gated", "topk"), ("gated", "other"))
    numbers = engine.weights.numbers(torch.bfloat16)
    for name, depth in (("gated", 1), ("other", 2)):
        (found,) = engine.lenses.maps_of(name, [depth])
        assert torch.equal(numbers[found.matrix : found.matrix + 36], draw.bfloat16().view(-1))
    x = torch.randn(9, WIDTH)
    reader = SaeReader(engine.weights, 1)
    for kind, (given, _) in made.items():
        encoder = engine.saes.get(kind).encoder
        assert encoder.matrix * 4 % 256 == 0
        assert torch.allclose(reader.encode(x, encoder).double(), given.encode(x), atol=1e-5)
        assert engine.saes.get(kind).sae.tap == ("resid_post", 2)


def test_an_sae_stays_while_requests_use_it(tmp_path: Path) -> None:
    engine = Fixture(ONE)
    _, loaded = sae("gated", tmp_path)
    engine.register(engine.saes, "a", loaded)
    engine.used.add(("lens", "a"))
    engine.register(engine.saes, "a", loaded)
    engine.used.add(("sae", "a"))
    with pytest.raises(BusyError, match="running requests use the SAE 'a'"):
        engine.saes.remove("a")
    engine.used.clear()
    with pytest.raises(SpecError, match=f"sae: its weights take {ONE} bytes, .* {ONE} are in use"):
        engine.register(engine.saes, "b", loaded)
    engine.saes.remove("a")
    engine.register(engine.saes, "b", loaded)
    with pytest.raises(SpecError, match="there is no SAE 'a'; there is `b`"):
        engine.saes.get("a")
    with pytest.raises(SpecError, match=r"sae: expected an SAE, such as .*, got `str`"):
        engine.register(engine.saes, "a", "folder")
    loaded.w_enc[0, 0] = torch.nan
    with pytest.raises(SpecError, match=r"sae\.w_enc: has numbers that are not finite"):
        engine.register(engine.saes, "b", loaded)


def test_features_that_requests_name_again_are_the_same_vectors(tmp_path: Path) -> None:
    """Reading them from the encoder takes tens of milliseconds of each request."""
    made = Fixture(3 * ONE)
    _, first = sae("standard", tmp_path)
    made.register(made.saes, "a", first)
    one, again = (made.saes.get("a").weights_of([3, 5], "scale") for _ in range(2))
    assert one is again
    alone = first.weights_of([3, 5], "scale")
    for name in ("encoder", "decoder"):
        assert [row.numpy().tolist() for row in one[name]] == alone[name].float().tolist()
    assert made.saes.get("a").weights_of([3, 5], "set") is not one
    assert made.saes.get("a").weights_of([5, 3], "scale")["bias"] == alone["bias"][::-1]
    many = [
        made.saes.get("a").weights_of([nth % FEATURES, nth], "scale") for nth in range(FEATURES)
    ]
    assert len({id(each) for each in many}) == FEATURES
