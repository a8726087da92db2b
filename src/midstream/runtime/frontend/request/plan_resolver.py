"""From a plan as given to its request payload: bound, resolved, checked and packed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from midstream.config.config import Config, from_additional_config
from midstream.errors import SpecError
from midstream.ops.layout import Op
from midstream.plan import (
    Capture,
    Plan,
    Positions,
    Prompt,
    ResolvedPlan,
)
from midstream.plan.plan import (
    Bound,
    BoundPlans,
    ServerWide,
    asks_engine,
    ids_of,
    read_prompts,
    reads_all,
)
from midstream.plan.positions.decoded_text import text_map
from midstream.plan.positions.items import CONTENT
from midstream.plan.probe_files.info import check_models
from midstream.plan.readouts.capture import SHARDED
from midstream.plan.readouts.reduced import check_codec, num_sums, with_split_rows
from midstream.plan.resolve.resolve import resolve
from midstream.plan.resolve.session_rules import check_growing
from midstream.plan.resolve.wire import to_bytes
from midstream.plan.resolved import path_of
from midstream.plan.vectors.named_lookup import Lookup
from midstream.runtime.frontend.request.budget import (
    ROWS,
    all_taps,
    max_row_bytes,
    need_of,
    with_device_rows,
)
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.controlled import with_controller
from midstream.runtime.frontend.request.prepared_plan import PreparedPlan
from midstream.runtime.frontend.request.prompt.media import media_of
from midstream.runtime.frontend.request.readouts import (
    EngineReadings,
    bound,
    check_heads,
    finished,
    readout_rows,
)
from midstream.runtime.frontend.request.reconstructions import read_saes
from midstream.runtime.frontend.request.sent_vectors import named_vectors
from midstream.runtime.frontend.request.switches import (
    check_acts,
    check_switches,
    everywhere,
    with_switches,
    without_switches,
)
from midstream.runtime.protocol.cache_keys import cache_keys
from midstream.runtime.protocol.rank_parts import check_parts, split_scores
from midstream.runtime.protocol.worker_info import this_process
from midstream.runtime.vllm.additional_config import controllers_of
from midstream.sites import Tap, order
from midstream.validation import at

if TYPE_CHECKING:
    from midstream.runtime.frontend.engine_info import EngineInfo
    from midstream.runtime.protocol.worker_info import WorkerInfo

# Many requests share a plan: it is resolved and packed once for each length of prompt.
_CACHED_PLANS = 256


@dataclass(frozen=True, slots=True)
class _Recent:
    """A prepared plan and what it was made with; holds the plan, whose parts' ids are keys."""

    bound: Bound
    before: tuple[ServerWide, ...]
    also: tuple[Capture, ...]
    prepared: PreparedPlan


# Tokens of all prompts that are kept; a token takes some 200 bytes.
MAX_TOKENS = 1 << 17
# The tokens of a prompt, and what identifies its chat, if it was made from one, and its media.
Key = tuple[tuple[int, ...], Hashable]


class KnownPrompts:
    """Recent prompts. All requests with the same tokens share one. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prompts: dict[Key, Prompt] = {}
        self._num_tokens = 0

    def get(self, key: Key, make: Callable[[], Prompt]) -> Prompt:
        with self._lock:
            prompt = self._prompts.pop(key, None)
            if prompt is None:
                prompt = make()
                self._num_tokens += prompt.length
            self._prompts[key] = prompt  # as the last one that was used
            while self._num_tokens > MAX_TOKENS and len(self._prompts) > 1:
                oldest = next(iter(self._prompts))
                self._num_tokens -= self._prompts.pop(oldest).length
        return prompt


class PlanResolver:
    """Resolves plans for one engine."""

    def __init__(self, info: EngineInfo, engine: Any, lookup: Lookup) -> None:
        self._info = info
        self._plans = BoundPlans(lookup, info.shape.num_layers)
        self.bind = self._plans.bind
        self._engine = engine
        self._config = from_additional_config(engine.vllm_config.additional_config) or Config()
        self._max_length: int = engine.vllm_config.model_config.max_model_len
        self._taps = all_taps(sorted(info.shape.taps, key=order))
        self._parts = {
            tap: parts
            for worker in info.workers
            for tap, parts in zip(worker.taps, worker.parts, strict=True)
            if parts > 1
        }
        # By `ids_of`, length of the prompt and max_tokens: values are not compared.
        self._recent: dict[tuple[Hashable, int, int | None], _Recent] = {}
        self._prompts = KnownPrompts()
        self._declared = controllers_of(engine.vllm_config)
        self.readings = EngineReadings(engine, info.workers, self._parts)
        self._finished = functools.lru_cache(maxsize=_CACHED_PLANS)(self._finish)

    def resolve(
        self,
        call_plan: CallPlan,
        before: tuple[ServerWide, ...],
        also: tuple[Capture, ...],
        request: Any,
    ) -> PreparedPlan:
        """Prepare the plan of a request. `also`, captures of every request, come after its own."""
        own = call_plan.plan
        length, max_tokens = _prompt_len(request), request.sampling_params.max_tokens
        if (known := self.known(own, before, also, length, max_tokens)) is not None:
            return known
        self._check_models(own)
        bound_plan = self._plans.bound(own)
        plan = bound_plan.plan
        if read_prompts(before, also) or (plan is not None and plan.needs_prompt):
            return self._finish(plan, before, also, self._prompt(request, call_plan), max_tokens)
        # Destinations of rows make no difference here, and may differ for each request.
        shared = None if plan is None else plan.without_places()
        prepared = None
        if reads_all(shared, before, also):
            with suppress(SpecError):  # of two mistakes, the prompt's length decides which is told
                prepared = _of_length(self._finished(shared, before, also, Prompt(1), None), length)
        if prepared is None:
            prepared = self._finished(shared, before, also, Prompt(length), max_tokens)
        if len(self._recent) >= _CACHED_PLANS:
            self._recent.clear()
        recent = _Recent(bound_plan, before, also, prepared)
        self._recent[ids_of(own), length, max_tokens] = recent
        return prepared

    def known(
        self,
        own: Plan | None,
        before: tuple[ServerWide, ...],
        also: tuple[Capture, ...],
        length: int,
        max_tokens: int | None,
    ) -> PreparedPlan | None:
        """Return what `resolve` has prepared of a plan for a prompt of a length; None: nothing."""
        recent = self._recent.get((ids_of(own), length, max_tokens))
        if recent is None or not self._plans.is_current(recent.bound):
            return None
        return recent.prepared if recent.before == before and recent.also == also else None

    def forget(self) -> None:
        """Forget what was prepared: names of lenses or SAEs have changed their meaning."""
        self._recent.clear()
        self._plans.forget()
        self._finished.cache_clear()

    def resolve_session(
        self,
        plan: Plan | None,
        before: tuple[ServerWide, ...],
        also: tuple[Capture, ...],
        first: int,
    ) -> PreparedPlan:
        """Prepare a streaming session's plan: all tokens but the first count as generated."""
        check_growing(plan, before, also)
        self._check_models(plan)
        return self._finish(
            self.bind(plan), before, also, Prompt(1, (first,), token_id=self._token_id), None
        )

    def _check_models(self, plan: Plan | None) -> None:
        # Equal plans share what was prepared, and differ in what is known of their probes.
        if plan is not None and any(probe.info is not None for probe in plan.probes):
            model = str(self._engine.vllm_config.model_config.model)
            check_models(plan.probes, model, self._info.shape)

    def check_captures(self, also: tuple[Capture, ...]) -> None:
        """Check that requests can have these server-wide captures together."""
        everywhere = tuple(replace(capture, positions=Positions("all")) for capture in also)
        if everywhere:
            self._finish(None, (), everywhere, Prompt(1), None)

    def check_before(self, before: tuple[ServerWide, ...]) -> None:
        """Check that requests can have these server-wide probes together."""
        self._finish(None, everywhere(before), (), Prompt(1), None)

    def _finish(
        self,
        plan: Plan | None,
        before: tuple[ServerWide, ...],
        also: tuple[Capture, ...],
        prompt: Prompt,
        max_tokens: int | None,
    ) -> PreparedPlan:
        unbound_plan = plan
        if plan is not None and asks_engine(plan):
            plan = bound(plan, self.readings)
        resolved = resolve(plan, self._info.shape, prompt, max_tokens, before, also)
        if resolved.captures:
            # Captures of every request use codec and ranks of the request's own, if it has any.
            own = () if plan is None else plan.captures
            own_captures = tuple(item for item in own if isinstance(item, Capture))
            vectors = tuple(capture for capture in own_captures if capture.returns_vectors)
            decisive = vectors or also or own_captures
            default, ranks_default = self._info.codec, self._info.return_
            codec = _common("codec", [capture.codec or default for capture in decisive], default)
            returns = [capture.return_ or ranks_default for capture in decisive]
            sharded = _common("return", returns, ranks_default) == SHARDED
            resolved = replace(resolved, codec=codec, sharded=sharded)
            if any(capture.heads is not None for capture in own):
                check_heads(own, resolved.codec)
        weights: tuple[tuple[str, str], ...] = ()
        workers, config = self._info.workers, self._engine.vllm_config
        reconstructs = Op.CODE in resolved.ops
        if reconstructs:
            weights = read_saes(plan, before, resolved, self.readings.registries.saes)
        if resolved.pattern_widths:
            check_codec(resolved)
            resolved, read = finished(resolved, plan, self.readings)
            weights = read + weights
        if self._parts:
            resolved = self._with_parts(resolved)
            check_parts(resolved, self._parts)
        at_once = sums = 0
        if resolved.pattern_widths or reconstructs:
            at_once = readout_rows(resolved, config, workers, max_tokens is None)
            sums = num_sums(resolved, self._info.shape)
        edits, width = workers[0].edits_per_site, self._info.shape.hidden_size
        ranks = workers[0].tensor_ranks
        named = named_vectors(resolved)
        counts = {
            ROWS: self._max_row_bytes(resolved, prompt.length, max_tokens),
            "readout_rows": at_once,
            "reductions": sums,
            "gate_states": sum(probe.is_scan for probe in resolved.probes),
        }
        need = need_of(resolved, self._taps, self._info.room, edits, width, ranks)
        counts = {name: count for name, count in counts.items() if count}
        need = replace(need, counts=counts, vectors=named, weights=weights)
        need = with_device_rows(need, resolved, self._info)
        check_biases(resolved, config)
        _check_ring(resolved, workers)
        _check_functions(resolved, workers)
        _check_gates(resolved, workers)
        _check_doses(resolved, self._parts, self._config)
        is_controlled = plan is not None and plan.controller is not None
        acts = any(probe.act is not None for probe in resolved.probes)
        if acts or is_controlled or any(probe.part_of for probe in resolved.probes):
            check_acts(resolved, is_controlled, workers)
        # Workers do not read the prompt's length: without it, prompts of any length have one plan,
        # which a worker reads once.
        packed = to_bytes(replace(resolved, prompt_len=1), frozenset(named))
        prepared = PreparedPlan(resolved, need, packed, cache_keys(resolved))

        def prepare(later: Plan) -> PreparedPlan:
            return self._finish(later, without_switches(before), also, prompt, max_tokens)

        room = self._info.room
        if acts:
            prepared = with_switches(prepared, unbound_plan, prepare, room, before)
        if is_controlled:
            check_switches(before)
            prepared = with_controller(prepared, unbound_plan, prepare, room, self._declared)
        if prepared.acts or prepared.control is not None:
            prepared = replace(prepared, split=split_scores(resolved, self._parts))
        return prepared

    def _max_row_bytes(self, plan: ResolvedPlan, prompt_len: int, max_tokens: int | None) -> int:
        length = self._max_length
        if max_tokens is not None:
            length = min(length, prompt_len + max_tokens)
        ranks = self._info.workers[0].tensor_ranks
        # Of rows of attention each rank has those of its heads.
        parts = self._parts | {
            tap: self._parts.get(read, 1)
            for capture in plan.captures
            if capture.pattern is not None
            for tap, read in zip(capture.taps, capture.pattern.reads, strict=True)
        }
        with at("capture[0]"):
            return max_row_bytes(plan, self._info.shape, length, ranks, parts)

    def _with_parts(self, plan: ResolvedPlan) -> ResolvedPlan:
        """Return the plan with attention of all heads where ranks have parts of these."""
        if not any(tap in self._parts for tap in plan.read_taps):
            return plan
        plan = with_split_rows(plan, self._parts)
        return replace(
            plan,
            captures=tuple(capture.of_all_heads(self._info.shape) for capture in plan.captures),
        )

    def _prompt(self, request: Any, call_plan: CallPlan) -> Prompt:
        ids, media = request.prompt_token_ids, media_of(request)
        # If only some of a prompt is tokens, there are placeholders among its ids.
        if ids is None or not all(getattr(request, "prompt_is_token_ids", None) or ()):
            return Prompt(_prompt_len(request), media=media)
        tokens = tuple(ids)
        tokenizer = self._tokenizer

        def parts(part: str = CONTENT) -> Any:
            return call_plan.spans(self._engine, tokenizer(), tokens, media, part)

        def make() -> Prompt:
            return Prompt(
                len(tokens),
                token_ids=tokens,
                text=lambda: text_map(tokenizer(), tokens),
                messages=None if call_plan.messages is None else parts,
                media=media,
                token_id=self._token_id,
            )

        chat = None if call_plan.messages is None else call_plan
        return self._prompts.get((tokens, (chat, media)), make)

    def _token_id(self, token: str | int) -> int:
        """Return the id of a token that the model has, given by its text or its id."""
        number = self.readings.token_id(token) if isinstance(token, str) else token
        if number >= self.readings.vocabulary:
            size = self.readings.vocabulary
            raise SpecError("", f"there is no token {number}: the model has {size}")
        return number

    def _tokenizer(self) -> Any:
        tokenizer = self._engine.get_tokenizer()
        if tokenizer is None:
            raise SpecError(
                "positions", "text and roles need a tokenizer, and this engine has none"
            )
        return tokenizer


def _of_length(prepared: PreparedPlan, length: int) -> PreparedPlan | None:
    """Return a plan whose parts are all of every token for a prompt of another length; None: that
    makes more of a difference to some part than the number itself.
    """
    plan, changes = prepared.plan, prepared.control is not None or prepared.later
    if plan.biases or changes or "readout_rows" in prepared.need.counts:
        return None
    return replace(prepared, plan=replace(plan, prompt_len=length))


def _check_ring(plan: ResolvedPlan, workers: Sequence[WorkerInfo]) -> None:
    wanted = set(plan.read_taps)
    for worker in workers:
        # Under pipeline parallelism each stage captures its own layers.
        triples = zip(worker.taps, worker.widths, worker.parts, strict=True)
        mine = [(width, parts) for tap, width, parts in triples if tap in wanted]
        widths = [width for width, parts in mine if parts == 1]
        if plan.sharded:
            ranks = worker.tensor_ranks
            widths = max((widths[rank::ranks] for rank in range(ranks)), key=sum)
        split = sum(width for width, parts in mine if parts > 1)
        at_once = -(-(sum(widths) + split) // worker.hidden_size)
        if at_once > worker.capture_limit:
            raise SpecError(
                "capture",
                f"{at_once} vectors a token are asked for, the staging ring has room for "
                f"{worker.capture_limit} when a step is full; raise midstream's setting "
                "staging_bytes, lower max_num_batched_tokens, or capture fewer layers or "
                "sites",
            )


def _check_functions(plan: ResolvedPlan, workers: Sequence[WorkerInfo]) -> None:
    """Check that the workers call functions, and have these or can import them."""
    for fn in plan.functions:
        with at(f"edits[{fn.source}]"):
            if not all(worker.functions for worker in workers):
                problem = 'this engine calls no functions: start it with midstream={"hooks": '
                raise SpecError("", problem + '"local"}')
            here = all(worker.functions == this_process() for worker in workers)
            if not here and not fn.path:
                raise SpecError(
                    "fn",
                    f"the workers are other processes, which cannot import {fn.name}: define it "
                    "at the top of a module that they can import, or set "
                    "VLLM_ENABLE_V1_MULTIPROCESSING=0",
                )


def _check_gates(plan: ResolvedPlan, workers: Sequence[WorkerInfo]) -> None:
    """Check that each gate is on the pipeline stage of its probe, where the score stays."""
    stages = {tap: worker.stage for worker in workers for tap in worker.taps}
    if len(set(stages.values())) == 1:
        return
    read: dict[int, list[Tap]] = {}
    for probe in plan.probes:
        read.setdefault(probe.slot, []).append((probe.site, probe.layer))
    for edit in plan.edits:
        for step in edit.steps.instructions:
            if step.op is Op.PROBE and step.slot is not None:
                read.setdefault(step.slot, []).append((edit.site, edit.layer))
    for edit in plan.edits:
        for step in edit.steps.instructions:
            if step.op is not Op.GATE or step.slot is None:
                continue
            for site, layer in read[step.slot]:
                if stages[site, layer] == stages[edit.site, edit.layer]:
                    continue
                raise SpecError(
                    f"edits[{edit.source}].probe",
                    f"the gate reads {site} of layer {layer}, which is on another pipeline "
                    f"stage than layer {edit.layer}; read a layer of the same stage",
                )


def _check_doses(plan: ResolvedPlan, parts: Mapping[Tap, int], config: Config) -> None:
    """Check that the dose of each edit is measured, if there is a largest one."""
    if config.max_dose is None:
        return
    limit = f"and max_dose={config.max_dose:g} needs the dose of each edit"
    for fn in plan.functions:
        raise SpecError(path_of(fn.source), f"a function has no dose, {limit}: omit it")
    for (source, site, layer), column in plan.measured.items():
        if (site, layer) in parts:
            raise SpecError(
                path_of(source),
                f"{site} is split over {parts[site, layer]} ranks, so its dose is not measured, "
                f"{limit}: edit the residual stream, or use tensor_parallel_size=1",
            )
        if column >= config.doses:
            raise SpecError(
                path_of(source),
                f"the request has {len(plan.measured)} edits, one for each layer, {limit}: the "
                f"setting doses is {config.doses}; raise it, or edit fewer layers",
            )


def _common(name: str, values: Sequence[str], default: str) -> str:
    """Return the value that a field has in all captures of a request; without any, the default."""
    for index, value in enumerate(values):
        if value != values[0]:
            raise SpecError(
                f"capture[{index}].{name}",
                f"{value}, and that of capture[0] is {values[0]}; all captures of a request have "
                f"one {name}",
            )
    return values[0] if values else default


def _prompt_len(request: Any) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return int(request.prompt_embeds.shape[0])


def check_biases(plan: ResolvedPlan, vllm_config: Any) -> None:
    if not plan.biases:
        return
    source = next(edit.source for edit in plan.edits if edit.site == "logits")
    path = path_of(source)
    if getattr(vllm_config.parallel_config, "enable_batch_sharded_sampling", False):
        raise SpecError(path, "a bias is unsupported with enable_batch_sharded_sampling: remove it")
    vocabulary = int(vllm_config.model_config.get_vocab_size())
    largest = max(max(bias.tokens) for bias in plan.biases)
    if largest >= vocabulary:
        raise SpecError(
            f"{path}.tokens",
            f"there is no token {largest}: the model has {vocabulary}, 0 to {vocabulary - 1}",
        )
