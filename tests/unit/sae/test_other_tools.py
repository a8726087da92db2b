"""SAEs in the folders of other tools are encoded and decoded as by the tools' own code."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from support.refusals import refused
from torch import Tensor
from torch.nn.functional import linear, relu

from midstream import SAE
from midstream.errors import SpecError

WIDTH, FEATURES, TOP = 6, 10, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


X = 2 * draw(7, WIDTH, seed=9)


def largest(activations: Tensor) -> Tensor:
    values, ids = activations.topk(TOP, -1)
    return torch.zeros_like(activations).scatter_(-1, ids, values)


def dictionary(kind: str, tensors: dict[str, Tensor], **more: Any) -> Any:
    """Files of dictionary_learning, and its formulas."""

    def write(folder: Path) -> Path:
        torch.save(tensors, folder / "ae.pt")
        trainer = {"dict_class": kind, "activation_dim": WIDTH, "dict_size": FEATURES, "layer": 4,
                   "submodule_name": "resid_post_layer_4", **more}  # fmt: skip
        (folder / "config.json").write_text(json.dumps({"trainer": trainer, "buffer": {}}))
        return folder

    return write


ENC, DEC = draw(FEATURES, WIDTH), draw(WIDTH, FEATURES, seed=1)
B_ENC, B_DEC = draw(FEATURES, seed=2), draw(WIDTH, seed=3)
THRESHOLD = draw(FEATURES, seed=4).abs()
GATE, MAG, R = (draw(FEATURES, seed=seed) for seed in (5, 6, 7))
LINEAR = {"encoder.weight": ENC, "encoder.bias": B_ENC, "decoder.weight": DEC}
NORMS = DEC.norm(dim=0)


def saved(name: str, tensors: dict[str, Tensor], config: str, fields: dict[str, Any]) -> Any:
    """A file of safetensors, and one of JSON or YAML."""

    def write(folder: Path) -> Path:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
        dump = yaml.safe_dump if config.endswith("yaml") else json.dumps
        (folder / config).write_text(dump(fields))
        return folder / name if config.endswith("yaml") else folder

    return write


LLAMA = {
    "d_model": WIDTH, "d_sae": FEATURES, "act_fn": "jumprelu", "jump_relu_threshold": 0.7,
    "norm_activation": "dataset-wise", "apply_decoder_bias_to_pre_encoder": False,
    "dataset_average_activation_norm": {"in": 5.0, "out": 3.0},
    "sparsity_include_decoder_norm": True, "hook_point_in": "blocks.4.hook_resid_post",
    "hook_point_out": "blocks.4.hook_resid_post", "top_k": 50,
}  # fmt: skip
ROOT = WIDTH**0.5


def llama_scope(x: Tensor) -> Tensor:
    pre = linear(x * (ROOT / 5.0), ENC, B_ENC)
    return pre * (pre * NORMS > 0.7)


def gated(x: Tensor) -> Tensor:
    pre = linear(x - B_DEC, ENC)
    return (pre + GATE > 0) * relu(R.exp() * pre + MAG) * NORMS


def jumprelu(x: Tensor) -> Tensor:
    pre = x @ ENC.T + B_ENC
    return relu(pre * (pre > THRESHOLD)) * NORMS


SPARSIFY = {"d_in": WIDTH, "num_latents": FEATURES, "k": TOP, "activation": "topk"}
SKIP = draw(WIDTH, WIDTH, seed=8)
SPARSE = {**{key: LINEAR[key] for key in ("encoder.weight", "encoder.bias")}, "W_dec": DEC.T}
SPARSE |= {"b_dec": B_DEC}
GEMMA = {"architecture": "jump_relu", "hf_hook_point_in": "model.layers.4.output"}
SCOPE = {"w_enc": ENC.T, "w_dec": DEC.T, "b_enc": B_ENC, "b_dec": B_DEC, "threshold": THRESHOLD}
MLP = {"hf_hook_point_in": "model.layers.4.pre_feedforward_layernorm.output",
       "hf_hook_point_out": "model.layers.4.post_feedforward_layernorm.output"}  # fmt: skip
TRACED = {"W_enc": ENC, "W_dec": DEC.T, "b_enc": B_ENC, "b_dec": B_DEC}
HOOKS = {"feature_input_hook": "mlp.hook_in", "feature_output_hook": "mlp.hook_out"}
SQUARE = draw(WIDTH, WIDTH, seed=11)
RESID, MLP_IN = "blocks.4.hook_resid_post", "blocks.4.mlp.hook_in"

# (what writes it, encode, decode, hook name)
CASES: dict[str, tuple[Any, Any, Any, str | None]] = {
    "AutoEncoder": (
        dictionary("AutoEncoder", {**LINEAR, "bias": B_DEC}),
        lambda x: relu(linear(x - B_DEC, ENC, B_ENC)), lambda f: linear(f, DEC) + B_DEC, RESID,
    ),
    "AutoEncoderNew": (
        dictionary("AutoEncoderNew", {**LINEAR, "decoder.bias": B_DEC}),
        lambda x: relu(linear(x, ENC, B_ENC)), lambda f: linear(f, DEC, B_DEC), RESID,
    ),
    "AutoEncoderTopK": (
        dictionary(
            "AutoEncoderTopK",
            {**LINEAR, "b_dec": B_DEC, "k": torch.tensor(TOP), "threshold": torch.tensor(9.0)},
        ),
        lambda x: largest(relu(linear(x - B_DEC, ENC, B_ENC))), lambda f: linear(f, DEC) + B_DEC,
        RESID,
    ),
    "BatchTopKSAE": (
        dictionary(
            "BatchTopKSAE",
            {**LINEAR, "b_dec": B_DEC, "k": torch.tensor(TOP), "threshold": torch.tensor(0.5)},
        ),
        lambda x: (pre := relu(linear(x - B_DEC, ENC, B_ENC))) * (pre > 0.5),
        lambda f: linear(f, DEC) + B_DEC, RESID,
    ),
    "MatryoshkaBatchTopKSAE": (
        dictionary(
            "MatryoshkaBatchTopKSAE",
            {"W_enc": ENC.T, "W_dec": DEC.T, "b_enc": B_ENC, "b_dec": B_DEC, "k": torch.tensor(TOP),
             "threshold": torch.tensor(0.5), "group_sizes": torch.tensor([4, 6]),
             "active_groups": torch.tensor(2)},
        ),
        lambda x: (pre := relu(linear(x - B_DEC, ENC, B_ENC))) * (pre > 0.5),
        lambda f: linear(f, DEC) + B_DEC, RESID,
    ),
    "JumpReluAutoEncoder": (
        dictionary(
            "JumpReluAutoEncoder",
            {"W_enc": ENC.T, "W_dec": DEC.T, "b_enc": B_ENC, "b_dec": B_DEC,
             "threshold": THRESHOLD},
        ),
        jumprelu, lambda f: linear(f / NORMS, DEC) + B_DEC, RESID,
    ),
    "GatedAutoEncoder": (
        dictionary(
            "GatedAutoEncoder",
            {"encoder.weight": ENC, "decoder.weight": DEC, "decoder_bias": B_DEC, "r_mag": R,
             "gate_bias": GATE, "mag_bias": MAG},
        ),
        gated, lambda f: linear(f / NORMS, DEC) + B_DEC, RESID,
    ),
    "square": (
        dictionary(
            "AutoEncoder",
            {"encoder.weight": SQUARE, "encoder.bias": B_DEC, "decoder.weight": SKIP,
             "bias": B_DEC},
            dict_size=WIDTH,
        ),
        lambda x: relu(linear(x - B_DEC, SQUARE, B_DEC)), lambda f: linear(f, SKIP) + B_DEC, RESID,
    ),
    "sparsify": (
        saved("sae.safetensors", SPARSE, "cfg.json", SPARSIFY),
        lambda x: largest(relu(linear(x - B_DEC, ENC, B_ENC))), lambda f: linear(f, DEC) + B_DEC,
        None,
    ),
    "sparsify transcoder": (
        saved("sae.safetensors", {**SPARSE, "W_skip": SKIP}, "cfg.json",
              {**SPARSIFY, "transcode": True, "skip_connection": True}),
        lambda x: largest(relu(linear(x, ENC, B_ENC))), lambda f: linear(f, DEC) + B_DEC, None,
    ),
    "Gemma Scope 2": (
        saved("params.safetensors", SCOPE, "config.json", GEMMA),
        lambda x: (pre := linear(x, ENC, B_ENC)) * (pre > THRESHOLD),
        lambda f: linear(f, DEC, B_DEC),
        RESID,
    ),
    "Gemma Scope 2 transcoder": (
        saved("params.safetensors", {**SCOPE, "affine_skip_connection": SKIP.T}, "config.json",
              {**GEMMA, **MLP}),
        lambda x: (pre := linear(x, ENC, B_ENC)) * (pre > THRESHOLD),
        lambda f: linear(f, DEC, B_DEC),
        MLP_IN,
    ),
    "Llama Scope": (
        saved("checkpoints/final.safetensors", {**LINEAR, "decoder.bias": B_DEC},
              "hyperparams.json", LLAMA),
        llama_scope, lambda f: linear(f, DEC, B_DEC) * (3.0 / ROOT), RESID,
    ),
    "circuit-tracer": (
        saved("layer_4.safetensors", {**TRACED, "W_skip": SKIP}, "config.yaml", HOOKS),
        lambda x: relu(linear(x, ENC, B_ENC)), lambda f: f @ DEC.T + B_DEC, MLP_IN,
    ),
    "circuit-tracer of JumpReLU": (
        saved("layer_4.safetensors", {**TRACED, "activation_function.threshold": THRESHOLD},
              "config.yaml", HOOKS),
        lambda x: (pre := linear(x, ENC, B_ENC)) * (pre > THRESHOLD), lambda f: f @ DEC.T + B_DEC,
        MLP_IN,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_read_by_the_formula_of_its_tool(name: str, tmp_path: Path) -> None:
    write, encode, decode, hook_name = CASES[name]
    sae = SAE.load(write(tmp_path))
    wanted = encode(X)
    assert 0 < (wanted > 0).sum() < wanted.numel()
    torch.testing.assert_close(sae.encode(X), wanted.clamp(min=0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sae.decode(wanted), decode(wanted), rtol=1e-4, atol=1e-5)
    assert sae.hook_name == hook_name
    is_transcoder = "transcoder" in name or "tracer" in name
    assert sae.is_transcoder == is_transcoder
    if is_transcoder and "JumpReLU" not in name:
        assert sae.w_skip is not None
        torch.testing.assert_close(sae.w_skip, SKIP)
    if hook_name == MLP_IN:
        assert sae.hook_name_out == "blocks.4.hook_mlp_out"
        assert sae.tap == ("mlp_in", 4)


def test_folders_of_sparsify_are_named_after_what_they_read(tmp_path: Path) -> None:
    for folder, more, hook_name, hook_out in (
        ("layers.4", {}, RESID, None),
        ("layers.4.mlp", {}, "blocks.4.hook_mlp_out", None),
        ("layers.4.mlp", {"transcode": True}, MLP_IN, "blocks.4.hook_mlp_out"),
    ):
        fields = {**SPARSIFY, **more}
        (tmp_path / folder).mkdir(exist_ok=True)
        sae = SAE.load(saved("sae.safetensors", SPARSE, "cfg.json", fields)(tmp_path / folder))
        assert (sae.hook_name, sae.hook_name_out) == (hook_name, hook_out)


def test_what_is_ambiguous_or_unknown_is_refused(tmp_path: Path) -> None:
    def changed(name: str, file: str, **fields: Any) -> Path:
        folder = Path(tmp_path, f"case{len(list(tmp_path.iterdir()))}")
        folder.mkdir()
        path = CASES[name][0](folder)
        content = json.loads((folder / file).read_text())
        content.get("trainer", content).update(fields)
        (folder / file).write_text(json.dumps(content))
        return path

    pickled = changed("AutoEncoder", "config.json")
    (pickled / "ae.pt").write_bytes(pickle.dumps({"encoder.weight": print}))
    bare = Path(tmp_path, "bare")
    bare.mkdir()
    CASES["Gemma Scope 2"][0](bare)
    (bare / "config.json").unlink()
    refused(
        SAE.load,
        (changed("AutoEncoder", "config.json", dict_class="CrossCoder"), "dict_class: .*CrossCod"),
        (changed("AutoEncoder", "config.json", dict_size=7), r"W_enc: expected \[6, 7\] or its tr"),
        (changed("sparsify", "cfg.json", activation="groupmax"), "activation: expected `topk`"),
        (changed("Gemma Scope 2", "config.json", architecture="relu"), "expected `jump_relu`"),
        (changed("Llama Scope", "hyperparams.json", act_fn="topk"), "act_fn: expected 'jumprelu'"),
        (
            changed("Llama Scope", "hyperparams.json", sparsity_include_decoder_norm=None),
            "sparsity_include_decoder_norm: missing, and the decoder's rows are not of length 1",
        ),
        (changed("Llama Scope", "hyperparams.json", norm_activation="token-wise"), "token-wise"),
        (pickled, "ae.pt: expected a file of tensors alone, which runs no code"),
        (bare, "config.json: No such file"),
    )
    whole = changed("AutoEncoder", "config.json")
    with pytest.raises(SpecError, match="apply_b_dec_to_input: .* specifies it; must be omitted"):
        SAE.load(whole, apply_b_dec_to_input=True)


def test_an_sae_is_written_as_saelens_writes_it(tmp_path: Path) -> None:
    for name, (write, *_) in CASES.items():
        read, again = tmp_path / f"{name} read", tmp_path / f"{name} again"
        read.mkdir()
        again.mkdir()
        sae = SAE.load(write(read))
        if sae.is_transcoder and sae.top_k:
            with pytest.raises(SpecError, match="top_k: SAELens has no transcoder"):
                sae.to_folder(again)
            continue
        sae.to_folder(again)
        other = SAE.load(again)
        torch.testing.assert_close(other.encode(X), sae.encode(X), rtol=0, atol=0)
        torch.testing.assert_close(other.decode(sae.encode(X)), sae.decode(sae.encode(X)))
        names = ("hook_name", "hook_name_out", "is_transcoder", "top_k", "normalize")
        assert all(getattr(other, each) == getattr(sae, each) for each in names)
