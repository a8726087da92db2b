"""Sites inside attention and the MLP of the models that `support.inner_oracle` has not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from support import engines, tiny
from torch import Tensor, nn

from midstream.runtime.models.decoder import find_layers
from midstream.runtime.models.inner_sites import InnerPlace, find_inner_sites

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
PROMPT = [3, 17, 42, 5, 99, 150, 7, 23, 64, 11, 180]
Rows = dict[str, Tensor]


def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """vLLM's `Attention.forward` for one prompt without a cache."""
    tokens = query.shape[0]
    shape = tokens, -1, self.head_size
    q, k, v = (one.reshape(shape).transpose(0, 1) for one in (query, key, value))
    groups = self.num_heads // self.num_kv_heads
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) * self.impl.scale
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return (weights @ v).transpose(0, 1).reshape(tokens, -1)


# ------------------------------------------------------------------------- vLLM


def vllm_model(path: Path) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a loaded model, and a function that runs it on `PROMPT`."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader import get_model

    config = EngineArgs(
        model=str(path),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        num_gpu_blocks_override=64,
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{path}.rendezvous", 0, "gloo")
            initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config)

    def run() -> Tensor:
        ids, positions = torch.tensor(PROMPT), torch.arange(len(PROMPT))
        context = set_forward_context(None, config, num_tokens=len(PROMPT))
        with torch.no_grad(), set_current_vllm_config(config), context:
            out = model(input_ids=ids, positions=positions)
        assert isinstance(out, Tensor)
        return out.reshape(len(PROMPT), -1).clone()

    return model, run


def hooked(layer: nn.Module, place: InnerPlace, act: Callable[[Tensor], None]) -> Any:
    """Call `act` with the columns of a place, which are no copy; return the hook's handle."""
    module = layer.get_submodule(place.path)

    def columns(tensor: Any) -> None:
        whole = tensor[0] if isinstance(tensor, tuple) else tensor
        assert isinstance(whole, Tensor)
        flat = whole.view(len(PROMPT), -1)
        act(flat[:, place.start : place.start + place.width])

    if place.at == "output":
        return module.register_forward_hook(lambda _, args, out: columns(out))

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ["query", "key", "value"] if place.argument else [""]
        name = place.argument or ""
        columns(kwargs[name] if name in kwargs else args[names.index(name)])

    return module.register_forward_pre_hook(before, with_kwargs=True)


def captured(layer: nn.Module, places: dict[str, InnerPlace], run: Callable[[], Any]) -> Rows:
    rows: Rows = {}
    handles = [
        hooked(layer, place, lambda part, site=site: rows.update({site: part.clone()}))  # type: ignore[misc]
        for site, place in places.items()
    ]
    run()
    for handle in handles:
        handle.remove()
    return rows


def unmoved(layer: nn.Module, places: dict[str, InnerPlace], run: Callable[[], Tensor]) -> set[str]:
    """Return the sites where an edit in place does not change what the model returns."""
    plain = run()
    still = set()
    for site, place in places.items():
        # The same for all keys would cancel.
        handle = hooked(
            layer, place, lambda part: part[::2].add_(torch.linspace(-1, 1, part.shape[1]))
        )
        if torch.allclose(run(), plain, atol=1e-4):
            still.add(site)
        handle.remove()
    return still


# ----------------------------------------------------------------- transformers


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


def examine(name: str, path: Path, wanted: Rows) -> dict[str, Any]:
    """Return by site the reason why it is lacking, or how far the place is from transformers."""
    model, run = vllm_model(path)
    layer = find_layers(model)[1]
    found = find_inner_sites(layer)
    places = {site: place for site, place in found.items() if isinstance(place, InnerPlace)}
    rows = captured(layer, places, run)
    still = unmoved(layer, places, run)
    assert not still, f"{name}: edits of {still} change nothing"
    result: dict[str, Any] = {}
    for site, place in found.items():
        if not isinstance(place, InnerPlace):
            result[site] = place.reason
        elif site not in wanted:
            result[site] = None
        else:
            assert rows[site].shape == wanted[site].shape, (name, site, rows[site].shape)
            error = (rows[site] - wanted[site]).norm() / wanted[site].norm()
            result[site] = float(error)
    return result


def main(folder: Path) -> None:
    from vllm.model_executor.layers.attention import Attention

    engines.prepare_vllm()
    tiny.MODELS.update(MODELS)
    torch.accelerator.empty_cache = lambda: None
    # Looked up by the class: the rules compare with what it has.
    Attention.forward = attend  # type: ignore[method-assign]
    paths = {name: tiny.make(name, folder) for name in MODELS}
    # First of all: vLLM's Transformers backend changes the classes of transformers.
    wanted = {name: reference(path, MODELS[name].layers, 1) for name, path in paths.items()}
    found = {name: examine(name, path, wanted[name]) for name, path in paths.items()}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
