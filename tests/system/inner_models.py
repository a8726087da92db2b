"""Sites inside attention and the MLP of the models that `support.inner_oracle` has not."""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from support import tiny
from support.engines import engine, greedy, tokens
from support.oracle import relative_error
from torch import Tensor, nn

from midstream import Capture, Steer

_FALCON = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": tiny.HIDDEN,
    "num_hidden_layers": tiny.LAYERS,
    "num_attention_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tiny.Tiny] = {
    "phi": tiny.MODELS["phi"],
    "qwen2": tiny.MODELS["qwen2"],
    "gpt_neox": tiny.Tiny(lambda: hf.GPTNeoXConfig(**tiny._COMMON), layers="gpt_neox.layers"),
    "stablelm": tiny.Tiny(
        lambda: hf.StableLmConfig(
            **{**tiny._COMMON, "num_key_value_heads": 1}, partial_rotary_factor=0.5
        )
    ),
    "falcon": tiny.Tiny(
        lambda: hf.FalconConfig(
            **_FALCON, multi_query=True, parallel_attn=True, bias=False, alibi=False
        ),
        layers="transformer.h",
    ),
    "cohere": tiny.Tiny(lambda: hf.CohereConfig(**{**tiny._COMMON, "num_key_value_heads": 1})),
    "olmo2": tiny.Tiny(lambda: hf.Olmo2Config(**{**tiny._COMMON, "num_key_value_heads": 1})),
}
BACKEND = {"phi", "gpt_neox", "olmo2"}  # on vLLM's Transformers backend from 0.32 on
UNGATED = {"phi", "gpt_neox", "falcon"}
TOLERANCE = 1e-4
PROMPT = [3, 17, 42, 5, 99, 150, 7, 23, 64, 11, 180]
Rows = dict[str, Tensor]


def sites_of(name: str) -> list[str]:
    """The inner sites that a model is known to have."""
    found = [] if name in BACKEND else ["q", "k", "v", "z"]
    found += [] if name in BACKEND | {"falcon"} else ["rot_q", "rot_k"]
    found += [] if name == "olmo2" else ["mlp_pre", "mlp_act"]
    return found if name in UNGATED | {"olmo2"} else [*found, "mlp_pre_linear"]


def _spy(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

    mixed = sdpa(module, query, key, value, None, **{**kwargs, "is_causal": True})[0]
    rows = {"rot_q": query, "rot_k": key, "v": value}
    module.spied = {name: one[0].transpose(0, 1).flatten(1) for name, one in rows.items()}
    module.spied["z"] = mixed[0].flatten(1)
    return mixed, None


def _first(layer: nn.Module, *names: str) -> nn.Module | None:
    for name in names:
        for path, module in layer.named_modules():
            if path.rpartition(".")[2] == name:
                return module
    return None


def reference(path: Path, layers: str, index: int) -> Rows:
    """Return what transformers has at each site of a layer that it is known to have."""
    hf.AttentionInterface.register("spy", _spy)
    own = "falcon" in path.name
    model = hf.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager" if own else "spy"
    )
    model = model.float().eval()
    layer: nn.Module = model.get_submodule(layers)[index]  # type: ignore[index]
    ins: Rows = {}
    outs: Rows = {}

    def remember(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        ins[id(module)], outs[id(module)] = args[0].flatten(0, -2), out.flatten(0, -2).clone()

    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(remember)
    with torch.no_grad():
        model(torch.tensor([PROMPT]))
    rows: Rows = {}
    for module in layer.modules():
        rows.update(getattr(module, "spied", {}))

    def take(site: str, of: Rows, *names: str) -> None:
        found = _first(layer, *names)
        if found is not None and id(found) in of:
            rows[site] = of[id(found)]

    for site in "qkv":
        take(site, outs, f"{site}_proj")
    if own:
        whole = outs[id(_first(layer, "query_key_value"))]
        rows["q"], rows["k"], rows["v"] = whole.split([tiny.HIDDEN, 32, 32], dim=1)
        take("z", ins, "dense")
    take("mlp_act", ins, "down_proj", "fc2", "dense_4h_to_h")
    take("mlp_pre", outs, "gate_proj", "fc1", "dense_h_to_4h")
    take("mlp_pre_linear", outs, "up_proj")
    return rows


def check(llm: Any, sites: list[str], wanted: Rows) -> None:
    """Rows are transformers', and an edit at each site changes what the model goes on with."""
    last = "resid_post", tiny.LAYERS - 1

    def run(edit: Any = None) -> Any:
        captures = [Capture(1, sites), Capture(last[1])]
        params = greedy(1, detokenize=False)
        [output] = llm.generate(
            tokens(PROMPT), params, capture=[captures], edits=edit, use_tqdm=False
        )
        return output.activations

    plain = run()
    for site in sites:
        rows = plain[site, 1].flatten(1)
        assert rows.shape == wanted[site].shape, site
        assert relative_error(rows, wanted[site]) < TOLERANCE, site
        # The same for all keys would cancel.
        push = torch.linspace(-1, 1, rows.shape[1])
        moved = run(Steer(push, 1, site=site, positions=slice(0, None, 2)))
        assert not torch.allclose(moved[last], plain[last], atol=1e-4), site


def main(folder: Path) -> None:
    tiny.MODELS.update(MODELS)
    paths = {name: tiny.make(name, folder) for name in MODELS}
    # First of all: vLLM's Transformers backend changes the classes of transformers.
    wanted = {name: reference(path, MODELS[name].layers, 1) for name, path in paths.items()}
    for name, path in paths.items():
        sites = sites_of(name)
        if sites:
            with engine(path, midstream={"sites": [*sites, "resid_post"]}) as llm:
                check(llm, sites, wanted[name])
        sys.stdout.write(f"{name}: {len(sites)} sites\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
