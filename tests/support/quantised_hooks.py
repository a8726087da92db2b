"""Rows and edits of an engine against plain PyTorch hooks on the engine's own modules, which hold
the same quantised weights: vLLM's model without taps, which it runs for requests without a plan.

`python -m support.quantised_hooks METHOD FOLDER` makes a checkpoint, compares, and prints JSON.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from midstream import Capture, Steer
from midstream.sites import Tap
from support.engines import engine, generated, greedy, tokens
from support.quantised import HEAD, HEADS, KV_HEADS, METHODS, WIDE, Method, adapter, make

PROMPT = [1, 5, 9, 33, 77, 100, 12, 8, 250, 401, 7]
COUNT = 4
EDITED_LAYER = 1
_QKV = (HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD)
WIDTHS = {"q": _QKV[0], "z": _QKV[0], "mlp_pre": WIDE, "mlp_act": WIDE}
EDITED = (
    "resid_pre", "attn_in", "q", "z", "attn_out", "resid_mid", "mlp_in", "mlp_pre", "mlp_act",
    "mlp_out", "resid_post",
)  # fmt: skip


class Answer(NamedTuple):
    """Tokens, the logprobs of each step, and the rows [T, W] by (site, layer)."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    rows: dict[Tap, Tensor]


class StockHooks:
    """Hooks on vLLM's model without taps, one request at a time."""

    def __init__(self, llm: Any, lora: Any) -> None:
        self._llm, self._lora = llm, lora
        self.request()
        # After a plain request the runner has the model without taps.
        model = llm.apply_model(lambda model: model)[0]
        self._layers = list(model.model.layers)
        self._rows: dict[Tap, list[Tensor]] = defaultdict(list)
        self._change: tuple[Tap, Tensor] | None = None

    def request(self, **plan: Any) -> Any:
        """Run the prompt; return vLLM's output."""
        params = greedy(COUNT, logprobs=5, detokenize=False)
        return self._llm.generate(
            tokens(PROMPT), params, use_tqdm=False, lora_request=self._lora, **plan
        )[0]

    def run(self, change: tuple[Tap, Tensor] | None = None) -> Answer:
        """Run the prompt with the hooks; `change` is a vector [W] added to the rows of a tap."""
        self._rows.clear()
        self._change = change
        with self._hooked():
            output = self.request()
        return answer_of(output, {tap: torch.cat(parts) for tap, parts in self._rows.items()})

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        handles: list[Any] = []
        for index, layer in enumerate(self._layers):
            self._hook_layer(layer, index, handles)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook_layer(self, layer: Any, index: int, handles: list[Any]) -> None:
        attention = layer.self_attn if hasattr(layer, "self_attn") else layer.attn
        mlp = layer.mlp

        def entry(module: nn.Module, meet: Callable[[list[Tensor]], None]) -> None:
            handles.append(
                module.register_forward_pre_hook(
                    lambda _module, args, named: meet(_floats((*args, *named.values()))),
                    with_kwargs=True,
                )
            )

        def leaving(module: nn.Module, meet: Callable[[list[Tensor]], None]) -> None:
            handles.append(
                module.register_forward_hook(lambda _module, _args, out: meet(_floats(out)))
            )

        def stream(site: str) -> Callable[[list[Tensor]], None]:
            return lambda parts: self._meet((site, index), parts[:2])

        def first(site: str) -> Callable[[list[Tensor]], None]:
            return lambda parts: self._meet((site, index), parts[:1])

        def columns(*sites: str) -> Callable[[list[Tensor]], None]:
            sizes = _QKV if sites[0] == "q" else (WIDE, WIDE)

            def meet(parts: list[Tensor]) -> None:
                for site, part in zip(sites, parts[0].split(sizes, -1), strict=True):
                    self._meet((site, index), [part])

            return meet

        def rotated(parts: list[Tensor]) -> None:
            for site, part in zip(("rot_q", "rot_k"), parts, strict=False):
                self._meet((site, index), [part.flatten(1)])

        entry(layer, stream("resid_pre"))
        entry(attention, first("attn_in"))
        leaving(attention.qkv_proj, columns("q", "k", "v"))
        entry(attention.attn, rotated)
        leaving(attention.attn, first("z"))
        leaving(attention, first("attn_out"))
        entry(layer.post_attention_layernorm, stream("resid_mid"))
        entry(mlp, first("mlp_in"))
        for name in ("router", "gate"):
            if hasattr(mlp, name):
                leaving(getattr(mlp, name), first("router"))
        if hasattr(mlp, "gate_up_proj"):
            leaving(mlp.gate_up_proj, columns("mlp_pre", "mlp_pre_linear"))
            entry(mlp.down_proj, first("mlp_act"))
        leaving(mlp, first("mlp_out"))
        leaving(layer, stream("resid_post"))

    def _meet(self, tap: Tap, parts: Sequence[Tensor]) -> None:
        """Record the rows of a tap, the sum of one tensor or two; change them in place."""
        if not parts:  # numbers that are quantised already
            return
        if self._change is not None and self._change[0] == tap:
            wide = sum(part.double() for part in parts) + self._change[1].to(parts[0].device)
            # The last half gets the row, the first what was rounded off.
            for part in reversed(parts):
                part.copy_(wide.float())
                wide = wide - part.double()
        rows = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        self._rows[tap].append(rows.float().cpu().clone())


def _floats(values: Any) -> list[Tensor]:
    """Return the tensors of floats [T, …] among arguments or results, in their order."""
    parts = values if isinstance(values, tuple) else (values,)
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    return [part for part in parts if isinstance(part, Tensor) and part.dtype in kinds]


def answer_of(output: Any, rows: Mapping[Tap, Tensor]) -> Answer:
    steps = output.outputs[0].logprobs
    logprobs = [{token: entry.logprob for token, entry in step.items()} for step in steps]
    return Answer(generated(output), logprobs, dict(rows))


def difference(one: Answer, other: Answer, taps: Sequence[Tap]) -> tuple[float, str]:
    """Return the largest relative error of a row, and where it is; inf: tokens or shapes differ."""
    if one.tokens != other.tokens:
        return float("inf"), "tokens"
    worst, where = 0.0, ""
    for tap in taps:
        a, b = one.rows[tap].double(), other.rows[tap].double()
        if a.shape != b.shape:
            return float("inf"), f"{tap}: {tuple(a.shape)} and {tuple(b.shape)}"
        lengths = b.norm(dim=-1)
        error = float(((a - b).norm(dim=-1) / lengths.clamp_min(0.1 * lengths.median())).max())
        if not error <= worst:
            worst, where = error, str(tap)
    for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
        for token in ours.keys() | theirs.keys():
            gap = abs(ours.get(token, 99.0) - theirs.get(token, 99.0))
            if not gap <= worst:
                worst, where = gap, "logprobs"
    return worst, where


def compare(llm: Any, method: Method, lora: Any) -> dict[str, Any]:
    """Compare captures and edits with hooks; return the figures."""
    hooks = StockHooks(llm, lora)
    taps = [(site, layer) for site in method.sites() for layer in range(len(hooks._layers))]
    capture = [Capture(layers="all", sites=method.sites())]
    plain, again = hooks.run(), hooks.run()
    report: dict[str, Any] = {"taps": len(taps), "rows": sum(map(len, plain.rows.values()))}
    report["missed"] = sorted({str(tap) for tap in taps} - set(map(str, plain.rows)))
    report["again"] = difference(again, plain, taps)
    report["captured"] = difference(_asked(hooks, capture), plain, taps)
    report["edits"] = {}
    for site in EDITED:
        if site not in method.sites():
            continue
        tap = site, EDITED_LAYER
        rows = plain.rows[tap]
        draw = torch.Generator().manual_seed(3)
        vector = torch.randn(rows.shape[1], generator=draw)
        vector *= 0.5 * float(rows.norm(dim=-1).median() / vector.norm())
        steer = Steer(vector, layer=EDITED_LAYER, site=site)
        ours = _asked(hooks, capture, edits=[steer])
        theirs, later = hooks.run((tap, vector)), ("resid_post", len(hooks._layers) - 1)
        size = plain.rows[later][: len(PROMPT)]
        moved = (theirs.rows[later][: len(PROMPT)] - size).norm() / size.norm()
        report["edits"][site] = [*difference(ours, theirs, taps), float(moved)]
    lacking = {site: llm.sites()[site, EDITED_LAYER].reason for site in method.lacking}
    return {**report, "lacking": lacking}


def _asked(hooks: StockHooks, capture: Any, **plan: Any) -> Answer:
    output = hooks.request(capture=capture, **plan)
    assert output.receipt.status == "ok", output.receipt
    rows = {tap: value.float().flatten(1) for tap, value in output.activations.items()}
    return answer_of(output, rows)


def lora_of(method: Method, path: Path) -> Any:
    """Return the adapter of a checkpoint's requests; None without."""
    if not method.lora:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, str(adapter(path)))


def settings_of(method: Method) -> dict[str, Any]:
    """Return the arguments of an engine."""
    return {
        "dtype": "bfloat16",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "midstream": {"sites": method.sites()},
        **method.engine,
    }


def main(name: str, folder: str) -> None:
    method = METHODS[name]
    path = make(name, Path(folder))
    with engine(path, **settings_of(method)) as llm:
        report = compare(llm, method, lora_of(method, path))
    sys.stdout.write(f"\n{json.dumps(report)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
