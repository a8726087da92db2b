"""Files of tuned and Jacobian lenses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.refusals import refused

from midstream.lenses import JacobianLens, TunedLens

WIDTH = 4
CONFIG = {"base_model_name_or_path": "m", "d_model": WIDTH, "num_hidden_layers": 2, "bias": True}


def translators() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)}
    return {
        f"{nth}.{part}": torch.randn(shape, generator=draw)
        for nth in range(2)
        for part, shape in shapes.items()
    }


def written(folder: Path, tensors: Any, name: str = "params.pt", **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if name.endswith(".pt"):
        torch.save(tensors, folder / name)
    else:
        save_file(tensors, folder / name)
    return folder


@pytest.mark.parametrize("name", ["params.pt", "params.safetensors"])
def test_a_tuned_lens_is_read_as_its_package_writes_it(tmp_path: Path, name: str) -> None:
    tensors = translators()
    found = TunedLens.load(written(tmp_path, tensors, name, lens_type="linear_tuned_lens"))
    assert found.adds
    assert sorted(found.matrices) == [0, 1]
    for nth in range(2):
        assert torch.equal(found.matrices[nth], tensors[f"{nth}.weight"])
        assert torch.equal(found.biases[nth], tensors[f"{nth}.bias"])


def test_a_tuned_lens_may_have_no_biases(tmp_path: Path) -> None:
    tensors = {name: one for name, one in translators().items() if name.endswith("weight")}
    assert TunedLens.load(written(tmp_path, tensors)).biases == {}


@pytest.mark.parametrize("name", ["lens.pt", "lens.safetensors"])
def test_a_jacobian_lens_is_of_the_stream_after_its_layers(tmp_path: Path, name: str) -> None:
    matrices = {layer: torch.randn(WIDTH, WIDTH).half() for layer in (0, 2)}
    path = tmp_path / name
    if name.endswith(".pt"):
        torch.save({"J": matrices, "n_prompts": 3, "source_layers": [0, 2], "d_model": 4}, path)
    else:
        save_file({str(layer): one for layer, one in matrices.items()}, path)
    found = JacobianLens.load(path)
    assert not found.adds
    assert found.biases == {}
    assert sorted(found.matrices) == [1, 3]
    assert torch.equal(found.matrices[3], matrices[2])


class Evil:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: one for key, one in translators().items() if key != name}


def test_files_of_something_else_are_refused(tmp_path: Path, capsys: Any) -> None:
    whole = translators()
    refused(
        lambda given: TunedLens.load(written(tmp_path, given[0], **given[1])),
        ((without("1.weight"), {}), "expected translators of 2 layers"),
        ((without("1.bias"), {}), "a bias for each matrix, or none"),
        ((whole | {"2.gain": torch.ones(1)}, {}), "unknown tensor '2.gain'"),
        ((whole, {"d_model": 8}), "config.json has d_model 8, the tensors 4"),
        ((whole, {"lens_type": "mlp"}), "config.json.lens_type: expected"),
        ((whole, {"num_hidden_layers": None}), "config.json.num_hidden_layers: expected"),
        ((whole | {"0.bias": torch.ones(3)}, {}), r"expected \[4\], got \[3\] at depth 0"),
        ((whole | {"0.bias": torch.full((4,), torch.nan)}, {}), "not finite"),
        (({"0.weight": Evil()}, {}), "expected a file of tensors alone, which runs no code"),
    )
    assert "executed" not in capsys.readouterr().out


def test_tensors_that_are_no_lens_are_refused(tmp_path: Path) -> None:
    refused(
        JacobianLens,
        ({}, "at least one layer"),
        ({0: torch.zeros(2, 3)}, r"expected \[3, 3\], got \[2, 3\]"),
        ({0: torch.zeros(3, 3), 1: [1.0]}, "floating-point numbers, got `list`"),
    )
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.zeros(2, 2)}, path)
    refused(JacobianLens.load, (path, "unknown tensor 'w'"))
    path.write_bytes(b"nonsense")
    refused(JacobianLens.load, (path, "is no file of safetensors"))
