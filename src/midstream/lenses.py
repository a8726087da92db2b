"""Tuned lenses and Jacobian lenses, and their published files. A map's depth is the number of
layers that the stream has passed: i at `resid_pre` of layer i, i + 1 at `resid_post`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from midstream.errors import SpecError
from midstream.hub import Card, HubObject
from midstream.torch_file import save_copies, tensors_by_name
from midstream.validation import at, check_regular, kind, read_int, read_json, show

if TYPE_CHECKING:
    from torch import Tensor

_MAX_CONFIG_BYTES = 1 << 20
_NAME = re.compile(r"(0|[1-9][0-9]{0,4})\.(weight|bias)")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LinearLens(HubObject):
    """Affine maps of the stream by depth, h ← A h + b or h ← h + A h + b, before norm and head."""

    matrices: Mapping[int, Tensor]  # A by depth, each [width, width]
    # b by depth, each [width]; of no or of all depths.
    biases: Mapping[int, Tensor] = field(default_factory=dict)
    adds: bool = False  # the stream to its image

    def __post_init__(self) -> None:
        if not self.matrices:
            raise SpecError("", "expected a matrix of at least one layer")
        width = self.width
        for depth, matrix in self.matrices.items():
            self._check(depth, matrix, (width, width))
        if self.biases and self.biases.keys() != self.matrices.keys():
            raise SpecError("", "expected a bias for each matrix, or none")
        for depth, bias in self.biases.items():
            self._check(depth, bias, (width,))

    @property
    def width(self) -> int:
        return int(next(iter(self.matrices.values())).shape[-1])

    def __repr__(self) -> str:
        kinds = f"{len(self.matrices)} maps of the stream, {self.width} wide"
        return f"{type(self).__name__}({kinds}, after {_listed(sorted(self.matrices))} layers)"

    def card(self) -> Card:
        """Return what the card of a repository says."""
        kind = "Tuned lens" if self.adds else "Jacobian lens"
        facts = {"After layers": _listed(sorted(self.matrices)), "Width": self.width}
        use = 'llm.lenses.register("lens", found)\nllm.generate(prompt, capture=Lens(kind="lens"))'
        return Card(kind, facts, use=use)

    @staticmethod
    def _check(depth: int, value: Any, shape: tuple[int, ...]) -> None:
        import torch

        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            raise SpecError("", f"expected tensors of floating-point numbers, got {kind(value)}")
        if tuple(value.shape) != shape:
            raise SpecError("", f"expected {list(shape)}, got {list(value.shape)} at depth {depth}")
        if not bool(torch.isfinite(value).all()):
            raise SpecError("", f"the map at depth {depth} has numbers that are not finite")


class TunedLens(LinearLens):
    """A tuned lens, Belrose et al. 2023 (arXiv:2303.08112): for the stream h that enters layer i,

        lens_i(h) = head(norm(h + W_i h + b_i))

    with the translator W_i, b_i of layer i, in the parametrisation of the package `tuned-lens`,
    which adds the translator's output to the stream. There is none after the last layer: there the
    logits are the model's own.
    """

    __slots__ = ()

    def __init__(self, weights: Mapping[int, Tensor], biases: Mapping[int, Tensor]) -> None:
        """Create it.

        Args:
            weights: W_i [width, width] by layer.
            biases: b_i [width] by layer; empty: there are none.

        Raises:
            SpecError: a tensor is missing, or has another shape than the others.
        """
        super().__init__(dict(weights), dict(biases), adds=True)

    @staticmethod
    def load(folder: str | Path) -> TunedLens:
        """Read a folder that the package `tuned-lens` wrote: `config.json` beside
        `params.safetensors` or `params.pt`. Nothing of `params.pt` is executed.

        Raises:
            SpecError: the files are not those of a tuned lens.
            OSError: a file cannot be read.
        """
        folder = Path(folder)
        with at("config.json"):
            layers, width = _read_config(folder / "config.json")
        path = folder / "params.safetensors"
        tensors = _load(path if path.exists() else folder / "params.pt")
        parts: dict[str, dict[int, Any]] = {"weight": {}, "bias": {}}
        for name, value in tensors.items():
            match = _NAME.fullmatch(str(name))
            if match is None:
                raise SpecError("params", f"unknown tensor {show(str(name))}; expected 0.weight, …")
            parts[match[2]][int(match[1])] = value
        if sorted(parts["weight"]) != list(range(layers)):
            raise SpecError("params", f"expected translators of {layers} layers, 0.weight, …")
        lens = TunedLens(parts["weight"], parts["bias"])
        if lens.width != width:
            raise SpecError("params", f"config.json has d_model {width}, the tensors {lens.width}")
        return lens

    hub_files: ClassVar[tuple[str, ...]] = ("config.json", "params.safetensors", "params.pt")

    def to_folder(self, folder: Path) -> None:
        """Write the folder that `load` reads, in the form of the package `tuned-lens`."""
        tensors = {f"{layer}.weight": matrix for layer, matrix in self.matrices.items()}
        tensors |= {f"{layer}.bias": bias for layer, bias in self.biases.items()}
        config: dict[str, object] = {"lens_type": "linear_tuned_lens", "d_model": self.width}
        config |= {"num_hidden_layers": len(self.matrices), "bias": bool(self.biases)}
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        save_copies(tensors, folder / "params.safetensors")

    @classmethod
    def from_folder(cls, folder: Path) -> TunedLens:
        """Read a folder; see `load`."""
        return cls.load(folder)


class JacobianLens(LinearLens):
    """A Jacobian lens (J-lens), Gurnee et al. 2026, "Verbalizable Representations Form a Global
    Workspace in Language Models": for the stream h that leaves layer l,

        lens_l(h) = head(norm(J_l h)),   J_l = E[∂h_final / ∂h_l]

    the mean over prompts and positions of the Jacobian of the stream that leaves the last layer, at
    the same and later positions. After the last layer the logits are the model's own.
    """

    __slots__ = ()

    def __init__(self, matrices: Mapping[int, Tensor]) -> None:
        """Create it.

        Args:
            matrices: J_l [width, width] by layer.

        Raises:
            SpecError: there is none, or they differ in shape.
        """
        super().__init__({layer + 1: matrix for layer, matrix in matrices.items()})

    @staticmethod
    def load(path: str | Path) -> JacobianLens:
        """Read a file of the package `jlens`, a `.pt` with matrices by layer under `J`, of which
        nothing is executed; or a `.safetensors` with a matrix under the number of each layer.

        Raises:
            SpecError: the file is not that of a Jacobian lens.
            OSError: the file cannot be read.
        """
        tensors = _load(Path(path))
        tensors = tensors.get("J", tensors)
        if not isinstance(tensors, Mapping):
            raise SpecError("J", f"expected matrices by layer, got {kind(tensors)}")
        matrices = {}
        for name, value in tensors.items():
            text = str(name).removesuffix(".weight").removeprefix("J.")
            if not text.isdecimal():
                raise SpecError("", f"unknown tensor {show(str(name))}; expected numbers of layers")
            matrices[int(text)] = value
        return JacobianLens(matrices)

    hub_files: ClassVar[tuple[str, ...]] = ("lens.safetensors",)

    def to_folder(self, folder: Path) -> None:
        """Write `lens.safetensors`, with a matrix under the number of each layer."""
        tensors = {str(depth - 1): matrix for depth, matrix in self.matrices.items()}
        save_copies(tensors, folder / "lens.safetensors")

    @classmethod
    def from_folder(cls, folder: Path) -> JacobianLens:
        """Read `lens.safetensors`; see `load`."""
        return cls.load(folder / "lens.safetensors")


def _listed(depths: list[int]) -> str:
    if len(depths) > 1 and depths == list(range(depths[0], depths[-1] + 1)):
        return f"{depths[0]} to {depths[-1]}"
    return ", ".join(map(str, depths))


def load_lens(path: str | os.PathLike[str]) -> LinearLens:
    """Read a lens: a folder as `TunedLens.load` does, a file as `JacobianLens.load` does."""
    return TunedLens.load(Path(path)) if Path(path).is_dir() else JacobianLens.load(Path(path))


def _read_config(path: Path) -> tuple[int, int]:
    if check_regular(path).st_size > _MAX_CONFIG_BYTES:
        raise SpecError("", f"more than {_MAX_CONFIG_BYTES} bytes")
    config = read_json(path.read_bytes())
    if not isinstance(config, dict):
        raise SpecError("", f"expected an object, got {kind(config)}")
    lens_type = config.get("lens_type", "linear_tuned_lens")
    if lens_type != "linear_tuned_lens":
        raise SpecError("lens_type", f'expected "linear_tuned_lens", got {show(str(lens_type))}')
    sizes = []
    for name in ("num_hidden_layers", "d_model"):
        with at(name):
            sizes.append(read_int(config.get(name)))
    return sizes[0], sizes[1]


def _load(path: Path) -> dict[Any, Any]:
    check_regular(path)
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(path))
        except SafetensorError as error:
            raise SpecError("", f"{path.name} is no file of safetensors: {error}") from error
    with at(path.name):
        return tensors_by_name(path)
