"""TransformerLens's `RemoteBridge` on an engine: the driver that runs its forward passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from midstream.errors import MissingExtraError, SpecError, UnsupportedError
from midstream.lab.api.cached_run import one_token
from midstream.plan.operation import Operation
from midstream.plan.operations.replace import Replace
from midstream.plan.operations.scale import Scale
from midstream.plan.readouts import Attention, Capture, Logits
from midstream.plan.readouts.attention import ATTENTION, QUERY_SITES
from midstream.plan.readouts.base import ReadOut
from midstream.plan.shape import ModelShape
from midstream.sites import ENDS, IN_LAYERS, SiteName, Tap, transformer_lens_name
from midstream.validation import at, hint, is_int, kind, listed, read_fields, read_float32

if TYPE_CHECKING:
    from torch import Tensor
    from transformer_lens.model_bridge.driver_protocol import ForwardResult
    from transformer_lens.model_bridge.remote_bridge import RemoteBridge

PATTERN = "pattern"
# Names of the bridge without a block, and the names that it knows and no engine has.
_ENDS = {"embed": "embed.hook_out", "final_norm": "ln_final.hook_out"}
_NEVER = (
    "blocks.{}.attn.hook_attn_scores",
    "ln_final.hook_normalized",
    "ln_final.hook_scale",
    "unembed.hook_out",  # before the logits' scale and cap
)
# The fields of an intervention by its `op`, besides `op` and `pos`.
_OPS: dict[str, tuple[str, ...]] = {
    "suppress": (), "scale": ("factor",), "add": ("value",), "set": ("value",)
}  # fmt: skip


def remote_bridge(llm: Any, tokenizer: Any = None) -> RemoteBridge:
    """Return TransformerLens's `RemoteBridge`, whose forward passes an engine runs.

    `run_with_cache`, `run_with_hooks` and `forward` are TransformerLens's own. They take one prompt
    as text or several as token ids, in rows or of different lengths, and return logits of every
    position. The cache has the tapped sites by both of TransformerLens's names; `attn.hook_pattern`
    too where the engine taps `rot_q`. Beside their arguments they take:

    - `intervene={name: {"op": …}}`: TransformerLens's "suppress", "scale" with `factor`, "add" and
      "set" with `value`, a number or a vector; `pos`, positions that these are restricted to.
    - `edits`: any edits of midstream, as for `generate`.

    Closing the bridge leaves the engine to its owner.

    Args:
        llm: an `LLM`, with any number of ranks, and with or without a prefix cache.
        tokenizer: transformers' tokenizer; None: the one of the model.

    Raises:
        MissingExtraError: TransformerLens is not installed.
        UnsupportedError: its version has no `RemoteBridge`, or it does not know the architecture.
    """
    MissingExtraError.require("transformer_lens", "remote_bridge")
    try:
        from transformer_lens.factories.architecture_adapter_factory import (
            ArchitectureAdapterFactory,
        )
        from transformer_lens.model_bridge.remote_bridge import RemoteBridge
        from transformer_lens.model_bridge.sources import _bridge_builder as builder
        from transformer_lens.model_bridge.sources._hf_format import (
            determine_architecture_from_hf_config,
        )
    except ImportError as error:
        raise UnsupportedError(
            f"this TransformerLens has no RemoteBridge ({error}): install "
            "transformer-lens>=4.3,<5; sae-lens installs an older one"
        ) from error
    model = llm.llm_engine.vllm_config.model_config
    try:
        name = determine_architecture_from_hf_config(model.hf_config)
        config = builder.build_bridge_config_from_hf(
            model.hf_config, name, str(model.model), model.dtype
        )
        adapter = ArchitectureAdapterFactory.select_architecture_adapter(config)
    except ValueError as error:
        raise UnsupportedError(f"TransformerLens does not know this model: {error}") from error
    if tokenizer is None and not model.skip_tokenizer_init:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            model.tokenizer,
            revision=model.tokenizer_revision,
            trust_remote_code=model.trust_remote_code,
        )
    if tokenizer is not None:
        tokenizer = builder.configure_tokenizer(tokenizer, adapter.cfg)
    driver = TransformerLensDriver(llm, adapter, tokenizer)
    return RemoteBridge(adapter, tokenizer, driver)


class TransformerLensDriver:
    """What a `RemoteBridge` calls; see `remote_bridge`.

    Attributes:
        supported_hook_points: the bridge's names of what the engine taps.
        non_fireable_hook_points: those of sites that it does not tap, or that no engine has.
    """

    provides_sequence_logits = True

    def __init__(self, llm: Any, adapter: Any, tokenizer: Any) -> None:
        shape: ModelShape = llm.info.shape
        self._llm = llm
        self._shape = shape
        self.bridge_config = adapter.cfg
        self.architecture = str(adapter.cfg.architecture)
        self.tokenizer = tokenizer
        named = names_of(shape, adapter.component_mapping)
        self._taps = {name: tap for name, tap in named.items() if _is_tapped(tap, shape)}
        never = {name.format(layer) for name in _NEVER for layer in range(shape.num_layers)}
        untapped = {tap for tap in named.values() if not _is_tapped(tap, shape)}
        others = {transformer_lens_name(tap) for tap in untapped if tap[0] != PATTERN}
        self.supported_hook_points = frozenset(self._taps)
        self.non_fireable_hook_points = frozenset(
            (named.keys() | never | others) - self._taps.keys()
        )

    def supports(self, feature: str) -> bool:
        """Return whether it has a feature of TransformerLens's `KNOWN_FEATURES`."""
        return feature == "weight_access"

    def get_param(self, name: str) -> Tensor:
        """Return a parameter outside the decoder layers, on the CPU; see `LLM.parameter`."""
        parameter: Tensor = self._engine().parameter(name)
        return parameter

    def close(self) -> None:
        """Forget the engine, which runs on."""
        self._llm = None

    def forward(
        self,
        input_ids: Any = None,
        *,
        capture: Sequence[str] = (),
        intervene: Mapping[str, Mapping[str, Any]] | None = None,
        max_new_tokens: int = 1,
        return_logits: bool = True,
        **others: Any,
    ) -> ForwardResult:
        """Compute prompts in one batch.

        Args:
            input_ids: token ids, [positions] or [prompts, positions], or lists of different
                lengths.
            capture: names of `supported_hook_points`.
            intervene: edits by such a name; see `remote_bridge`.
            max_new_tokens: 1: the token that vLLM samples is dropped.
            return_logits: False: no logits are computed.
            **others: `attention_mask`, 0 or 1 for each token, of which the ones are next to each
                other; `edits`; `output_attentions`, which the bridge passes and nothing reads.

        Returns:
            Logits, float32 [prompts, positions, vocabulary], and vectors by name, [prompts,
            positions, …], in the model's dtype. Where there is no token, at the end of a shorter
            prompt or outside the mask, logits are −∞ and vectors 0.

        Raises:
            SpecError: an argument is malformed, or a name is not among those that are supported.
        """
        if max_new_tokens != 1:
            raise SpecError("max_new_tokens", "expected 1; llm.generate continues a prompt")
        mask, edits = others.pop("attention_mask", None), others.pop("edits", None)
        others.pop("output_attentions", None)
        if others:
            raise SpecError(next(iter(others)), "the engine has no such argument")
        prompts = Prompts.read(input_ids, mask)
        taps = [self._tap("capture", name) for name in capture]
        asked = _captures(taps, return_logits)
        changes = self._edits(intervene or {}, prompts)
        if edits is not None:
            changes += edits if isinstance(edits, (list, tuple)) else [edits]
        outputs = self._engine().generate(
            prompts.ids,
            one_token(),
            capture=[asked] * len(prompts.ids) if asked else None,
            edits=[changes] * len(prompts.ids) if changes else None,
            use_tqdm=False,
        )
        vectors = {
            name: prompts.padded(
                [_value(output, tap) for output in outputs],
                axes=(1, 2) if tap[0] == PATTERN else (0,),
            )
            for name, tap in zip(capture, taps, strict=True)
        }
        logits = None
        if return_logits:
            logits = prompts.padded([output.logits.values for output in outputs], -np.inf)
        from transformer_lens.model_bridge.driver_protocol import ForwardResult

        return ForwardResult(logits, vectors, raw_output=outputs)

    def _engine(self) -> Any:
        if self._llm is None:
            raise SpecError("", "this bridge is closed; make another by remote_bridge(llm)")
        return self._llm

    def _tap(self, field: str, name: object) -> Tap:
        if name not in self._taps:
            known = hint(str(name), self._taps)
            raise SpecError(field, f"{name!r} is not among supported_hook_points{known}")
        return self._taps[str(name)]

    def _edits(self, intervene: Mapping[str, Any], prompts: Prompts) -> list[Any]:
        edits = []
        for name, spec in intervene.items():
            with at(f"intervene[{name!r}]"):
                site, layer = tap = self._tap("", name)
                if site == PATTERN:
                    raise SpecError("", "it can be read, and not changed")
                where = {"site": site, "layer": None if site in ENDS else layer}
                edits.append(_edit_of(spec, self._shape.width(tap), where, prompts))
        return edits


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of one forward pass: the tokens that the mask keeps of each, and where they begin."""

    ids: list[list[int]]
    starts: list[int]
    length: int  # of the longest, with the tokens that the mask leaves out

    @staticmethod
    def read(input_ids: Any, mask: Any) -> Prompts:
        rows = _rows("input_ids", input_ids)
        kept = [[1] * len(row) for row in rows] if mask is None else _rows("attention_mask", mask)
        if list(map(len, kept)) != list(map(len, rows)):
            raise SpecError("attention_mask", "expected a number for each token")
        ids, starts = [], []
        for row, keep in zip(rows, kept, strict=True):
            start, count = keep.index(1) if 1 in keep else 0, sum(keep)
            if not count or keep != [int(start <= n < start + count) for n in range(len(keep))]:
                raise SpecError(
                    "attention_mask", "expected 0 and 1, the ones of a prompt next to each other"
                )
            ids.append(row[start : start + count])
            starts.append(start)
        return Prompts(ids, starts, max(map(len, rows)))

    def positions(self, pos: Any) -> list[int]:
        """Return positions, which `pos` counts with what the mask leaves out, among the tokens."""
        places = [pos] if is_int(pos) else pos
        if not isinstance(places, (list, tuple)) or not all(map(is_int, places)):
            raise SpecError("", f"expected a position or a list of positions, got {kind(pos)}")
        if len(set(self.starts)) > 1:
            raise SpecError("", "prompts with masks of several starts are edited one at a time")
        start = self.starts[0]
        last = start + min(map(len, self.ids)) - 1
        outside = [place for place in places if not start <= place <= last]
        if outside or not places:
            where = ", beyond the prompt length" if outside and max(outside) > last else ""
            got = f"got {outside or [*places]}{where}"
            raise SpecError("", f"expected positions {start} to {last}, {got}")
        return [place - start for place in places]

    def padded(
        self, values: Sequence[Tensor], fill: float = 0.0, axes: tuple[int, ...] = (0,)
    ) -> Tensor:
        """Return the values of all prompts as one tensor; `axes` of a value are of positions."""
        if len(values) == 1 and values[0].shape[axes[0]] == self.length:
            return values[0][None]
        size = [self.length if n in axes else size for n, size in enumerate(values[0].shape)]
        padded = values[0].new_full((len(values), *size), fill)
        for whole, start, value in zip(padded, self.starts, values, strict=True):
            where = (slice(start, start + n) if axis in axes else slice(None)
                     for axis, n in enumerate(value.shape))  # fmt: skip
            whole[tuple(where)] = value
        return padded


def names_of(shape: ModelShape, components: Mapping[str, Any]) -> dict[str, Tap]:
    """Return the bridge's own name of every site that its components have, tapped or not.

    Components say where a hook is: `hook_attn_out` is `attn.hook_out`, but in a model with a norm
    after attention `ln1_post.hook_out`.
    """
    # What the embedding's own norm reads is no site.
    ends = {site: name for site, name in _ENDS.items() if name.partition(".")[0] in components}
    if "embed_ln" in components:
        ends.pop("embed", None)
    names = {name: (site, ENDS[site] % shape.num_layers) for site, name in ends.items()}
    block = components.get("blocks")
    hooks = {site: transformer_lens_name((site, 0)).split(".", 2)[2] for site in IN_LAYERS}
    for site, hook in {**hooks, PATTERN: "attn.hook_pattern"}.items():
        name = None if block is None else _own_name(block, hook)
        if name is not None:
            names |= {f"blocks.{n}.{name}": (site, n) for n in range(shape.num_layers)}
    return names


def _own_name(block: Any, hook: str) -> str | None:
    """Return a hook's path in a block, of which `hook` may be another name; None: it has none."""
    *path, last = hook.split(".")
    component = block
    for part in path:
        component = component.submodules.get(part)
        if component is None:
            return None
    if last in component.hook_aliases:
        target = component.hook_aliases[last]
        for own in target if isinstance(target, list) else [target]:
            if len(own.split(".")) == 1 or _own_name(component, own) is not None:
                return ".".join((*path, own))
        return None
    return hook if hasattr(component, last) else None


def _is_tapped(tap: Tap, shape: ModelShape) -> bool:
    site, layer = tap
    if site == PATTERN:
        readable = shape.reason((ATTENTION, layer)) is None
        return readable and any((query, layer) in shape.taps for query in QUERY_SITES)
    return tap in shape.taps


def _captures(taps: Sequence[Tap], return_logits: bool) -> list[ReadOut]:
    """Return the read-outs of some taps, and of the logits."""
    layers_of: dict[str, list[int]] = {}
    for site, layer in taps:
        layers_of.setdefault(site, []).append(layer)
    asked: list[ReadOut] = []
    if return_logits:
        asked.append(Logits(tokens="all", positions="prompt"))
    for site, layers in layers_of.items():
        if site == PATTERN:
            asked.append(Attention(layers, queries="prompt", reduce="full"))
        else:
            where = None if site in ENDS else layers
            asked.append(Capture(where, cast(SiteName, site), "prompt"))
    return asked


def _value(output: Any, tap: Tap) -> Tensor:
    """Return what an output has of a tap, [positions, …], or [heads, queries, keys]."""
    site, layer = tap
    if site == PATTERN:
        return cast("Tensor", output.attention[layer].values.transpose(0, 1))
    return cast("Tensor", output.activations[tap])


def _edit_of(spec: Any, width: int, where: dict[str, Any], prompts: Prompts) -> Operation:
    """Return TransformerLens's intervention as an edit."""
    op = spec.get("op") if isinstance(spec, Mapping) else None
    if not isinstance(op, str) or op not in _OPS:
        raise SpecError("", f"expected a dict whose `op` is {listed(_OPS)}, got {kind(spec)}: {op}")
    fields = read_fields(spec, required=("op", *_OPS[op]), optional=("pos",))
    if fields.get("pos") is not None:
        with at("pos"):
            where["positions"] = prompts.positions(fields["pos"])
    if op == "suppress":
        return Scale(0.0, **where)
    if op == "scale":
        with at("factor"):
            return Scale(read_float32(fields["factor"]), **where)
    with at("value"):
        value = fields["value"]
        if hasattr(value, "detach"):
            value = value.detach().cpu().float().numpy()
        flat = np.asarray(value, np.float32).reshape(-1)
        if flat.size not in (1, width):
            raise SpecError("", f"expected a number or {width} numbers, got {flat.size}")
        vector = np.broadcast_to(flat, width)
        return Replace(vector, **where) if op == "set" else Scale(1.0, shift=vector, **where)


def _rows(field: str, value: Any) -> list[list[int]]:
    """Return a list of integers for each prompt."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (list, tuple)):
        value = [value]
    if not isinstance(value, (list, tuple)) or not value or not all(
        isinstance(row, (list, tuple)) and row and all(is_int(n) for n in row) for row in value
    ):  # fmt: skip
        raise SpecError(
            field, f"expected integers, [positions] or [prompts, positions], got {kind(value)}"
        )
    return [[int(n) for n in row] for row in value]
