"""Records of requests: what was sent, and the exact bits of what came back, as JSON lines."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from midstream.errors import SpecError, StoreError
from midstream.lab.replay.engine_identity import check_settings, identify, settings_of
from midstream.plan import Capture, Plan
from midstream.plan.sink_target import MEMORY
from midstream.results.activations import Activations
from midstream.results.receipt import Receipt
from midstream.store import open_store
from midstream.validation import at, kind, read_count, read_fields, read_json, show

if TYPE_CHECKING:
    from midstream.api.llm import LLM

FORMAT = "midstream-record-1"
RECORD = "record"  # of a store's metadata
MOST_LINE = 256 << 20  # bytes of a line
_NO_NUMBERS = ("nan", "inf", "-inf")
# Parameters of vLLM's that have no JSON form, change no bit, or are midstream's.
_LEFT_OUT = ("extra_args", "output_kind", "skip_reading_prefix_cache")


@dataclass(frozen=True, slots=True)
class RecordedScores:
    """The scores of a probe: positions, and float32 [n] or [n, classes] as they came."""

    positions: tuple[int, ...]
    values: bytes  # float32, little-endian

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.values).hexdigest()

    def numbers(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the scores, float32 [n, classes]; of one class [n, 1]."""
        values = np.frombuffer(self.values, "<f4")
        return values.reshape(len(self.positions), -1 if self.positions else 1)


@dataclass(frozen=True, slots=True)
class RecordedRows:
    """The rows of a tap: positions, and 64 bits of the SHA-256 of each encoded row, in hex."""

    positions: tuple[int, ...]
    digests: tuple[str, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class RecordedResult:
    """What one completion was.

    Attributes:
        tokens: the generated tokens.
        logprobs: of each of them, as sampled; exact.
        scores: by name of the probe.
        rows: by tap, as `resid_post.3`.
        receipt: SHA-256 of what the receipt says of the plan; see `receipt_digest`.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    scores: Mapping[str, RecordedScores]
    rows: Mapping[str, RecordedRows]
    receipt: str


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request as it was sent, and what came back.

    Attributes:
        prompt: ids of its tokens.
        sampling: parameters of `vllm.SamplingParams` that differ from their defaults.
        plan: its plan with all vectors by value; None: nothing was asked.
        adapter: name, id and path of its LoRA adapter; None: none.
        results: of each completion.
        engine: what the bits depend on: versions, model, dtype, quantisation, hardware, settings.
        settings: more arguments of `LLM` that start such an engine.
        stored: reads its rows, if they are in a store; None: their digests are known alone.
    """

    prompt: tuple[int, ...]
    sampling: Mapping[str, Any]
    plan: Plan | None
    adapter: Mapping[str, Any] | None
    results: tuple[RecordedResult, ...]
    engine: Mapping[str, Any]
    settings: Mapping[str, Any]
    stored: Callable[[], Activations] | None = field(default=None, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, which `parse` reads."""
        return {
            "format": FORMAT,
            "engine": dict(self.engine),
            "settings": dict(self.settings),
            "request": {
                "prompt_token_ids": list(self.prompt),
                "sampling": dict(self.sampling),
                "plan": None if self.plan is None else self.plan.to_dict(),
                "adapter": self.adapter and dict(self.adapter),
            },
            "results": [_emit(result) for result in self.results],
        }

    @staticmethod
    def parse(value: object) -> RecordedRequest:
        """Read a request from its JSON form.

        Raises:
            SpecError: it is malformed, or a digest is not that of its values.
        """
        names = ("format", "engine", "settings", "request", "results")
        fields: Any = read_fields(value, required=names, optional=())
        if fields["format"] != FORMAT:
            raise SpecError("format", f"expected {FORMAT}, got {show(fields['format'])}")
        for name, known in (("engine", dict), ("settings", dict), ("results", list)):
            if not isinstance(fields[name], known):
                raise SpecError(name, f"expected `{known.__name__}`, got {kind(fields[name])}")
        with at("settings"):
            check_settings(fields["settings"])
        with at("request"):
            parts = ("prompt_token_ids", "sampling", "plan", "adapter")
            sent: Any = read_fields(fields["request"], required=parts, optional=())
            with at("plan"):
                plan = None if sent["plan"] is None else Plan.parse(sent["plan"])
            prompt = _read_tokens("prompt_token_ids", sent["prompt_token_ids"])
            for name in ("sampling", "adapter"):
                if not isinstance(sent[name], dict) and (name, sent[name]) != ("adapter", None):
                    raise SpecError(name, f"expected `dict`, got {kind(sent[name])}")
        results = []
        for index, result in enumerate(fields["results"]):
            with at(f"results[{index}]"):
                results.append(_read_result(result))
        return RecordedRequest(
            prompt,
            sent["sampling"],
            plan,
            sent["adapter"],
            tuple(results),
            fields["engine"],
            fields["settings"],
        )


class Recorder:
    """Generates as `LLM.generate` does, and appends each request to a file of JSON lines."""

    def __init__(self, llm: LLM, path: str | os.PathLike[str]) -> None:
        """Create it for an engine; a file that exists is continued."""
        self._llm, self._path = llm, Path(path)
        self._engine, self._settings = identify(llm), settings_of(llm)

    def generate(
        self,
        prompts: Sequence[Any],
        sampling_params: Any,
        *,
        lora_request: Any = None,
        **asked: Any,
    ) -> list[Any]:
        """Generate, and append a line for each prompt; the logprobs of sampled tokens are asked for
        in addition.

        Args:
            prompts: texts or token ids; a list.
            sampling_params: for all, or one per prompt.
            lora_request: one adapter for all; None: none.
            **asked: `capture`, `edits`, `probes` and `controller`, one value for all prompts.

        Returns:
            The outputs of `LLM.generate`.

        Raises:
            SpecError: a request could not be run again alike: the field, and what can.
        """
        llm = self._llm
        if llm.steering.plan_edits():
            raise SpecError(
                "steering", "server-wide edits are not recorded: llm.steering.clear(), and `edits`"
            )
        plan = Plan.make(**asked)
        bound = None if plan is None else _bound(plan, llm)
        several = isinstance(sampling_params, Sequence)
        listed = [*sampling_params] if several else [sampling_params] * len(prompts)
        if len(listed) != len(prompts):
            raise SpecError("sampling_params", f"{len(listed)} for {len(prompts)} prompts")
        for index, prompt in enumerate(prompts):
            extra = set(prompt) - {"prompt", "prompt_token_ids"} if isinstance(prompt, dict) else ()
            if extra:
                raise SpecError(
                    f"prompts[{index}].{min(extra)}", "only tokens are recorded: leave it out"
                )
        params = [*map(recordable, listed)]
        sampling = [*map(sampling_to_dict, params)]
        outputs = llm.generate(
            prompts, [attached(own, bound) for own in params], lora_request=lora_request,
            use_tqdm=False,
        )  # fmt: skip
        adapter = lora_request and {
            "name": lora_request.lora_name,
            "id": lora_request.lora_int_id,
            "path": lora_request.lora_path,
        }
        with self._path.open("a", encoding="utf-8") as file:
            for output, fields in zip(outputs, sampling, strict=True):
                record = recorded(output, fields, bound, self._engine, self._settings)
                file.write(json.dumps(replace(record, adapter=adapter).to_dict()) + "\n")
        return list(outputs)


def recorded(
    output: Any,
    sampling: Mapping[str, Any],
    plan: Plan | None,
    engine: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> RecordedRequest:
    """Return the record of an output of `LLM.generate` whose parameters are `recordable`."""
    return RecordedRequest(
        tuple(output.prompt_token_ids), sampling, plan, None, results_of(output), engine, settings
    )


def results_of(output: Any) -> tuple[RecordedResult, ...]:
    """Return the exact results of each completion of an output."""
    alone = len(output.outputs) == 1
    return tuple(
        _result(output if alone else completion, completion) for completion in output.outputs
    )


def receipt_digest(receipt: Receipt) -> str:
    """Return the SHA-256 of what a receipt says of its plan: without its id, and without what the
    prefix cache had, which other requests change.
    """
    said = receipt.to_dict()
    for captured in said["captured"]:
        captured.pop("reused", None)
    edited = said["edited"]
    said["edited"] = edited and edited["expected"]
    names = ("number", "source", "positions", "scale", "expected")
    said["versions"] = [
        {name: version[name] for name in names} for version in said.get("versions", ())
    ]
    for name in ("request_id", "kept", "coming_from", "called"):
        said.pop(name, None)
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def read_records(path: str | os.PathLike[str]) -> list[RecordedRequest]:
    """Read the requests of a file of `Recorder`, or of a store of `midstream capture --record`.

    Raises:
        SpecError: a line is malformed, or a request of the store has no record.
        OSError, StoreError: it cannot be read.
    """
    name = os.fspath(path)
    if "://" in name or os.path.isdir(name):
        return list(_of_store(name))
    with open(name, "rb") as file:
        records = []
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE + 1), b""), 1):
            with at(f"line {number}"):
                if len(line) > MOST_LINE:
                    raise SpecError("", f"expected at most {MOST_LINE} bytes")
                records.append(RecordedRequest.parse(read_json(line)))
    if not records:
        raise SpecError(name, "it has no requests; write some with `Recorder`")
    return records


def _of_store(root: str) -> Iterator[RecordedRequest]:
    store = open_store(root)
    if not len(store.requests):
        raise StoreError(f"{root}: it has no requests")
    for request in store.requests:
        value = request.metadata.get(RECORD)
        with at(f"{root}: {request.request}"):
            if value is None:
                raise SpecError(
                    "", "it has no record of its request: capture with midstream capture --record"
                )
            record = RecordedRequest.parse(value)
        yield replace(record, stored=request.activations)


def recordable(params: Any) -> Any:
    """Return a copy of sampling parameters with logprobs of sampled tokens.

    Raises:
        SpecError: a request with these could not be run again alike.
    """
    if params.temperature > 0 and params.seed is None:
        raise SpecError(
            "sampling_params.seed",
            "expected a seed, as temperature is above 0: tokens are drawn anew otherwise",
        )
    if params.prompt_logprobs is not None:
        raise SpecError("sampling_params.prompt_logprobs", "is not recorded: leave it out")
    if params.extra_args:
        raise SpecError("sampling_params.extra_args", "give plans as arguments of the call")
    own = params.clone()
    own.logprobs = 0 if own.logprobs is None else own.logprobs
    return own


def sampling_to_dict(params: Any) -> dict[str, Any]:
    """Return the fields of sampling parameters that differ from their defaults, as JSON values."""
    import msgspec

    plain = params.clone()
    plain.extra_args = None
    fields: dict[str, Any] = msgspec.to_builtins(plain)
    fields = {
        name: value
        for name, value in fields.items()
        if not name.startswith("_") and name not in _LEFT_OUT and value is not None
    }
    fields.pop("output_text_buffer_length", None)  # follows from `stop`
    fields.pop("eos_token_id", None)
    again = msgspec.to_builtins(sampling_of(fields))
    for name, value in fields.items():
        if again.get(name, value) != value:
            raise SpecError(f"sampling_params.{name}", "has no JSON form: leave it out")
    return fields


def sampling_of(fields: Mapping[str, Any]) -> Any:
    """Return the sampling parameters of a record."""
    import msgspec
    from vllm import SamplingParams

    known = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    for name in sorted(set(fields) - known.difference(_LEFT_OUT)):
        raise SpecError(f"request.sampling.{name}", "vLLM has none that a record has")
    try:
        return msgspec.convert(fields, SamplingParams, str_keys=True)
    except (TypeError, ValueError) as error:  # that of msgspec is a ValueError
        raise SpecError("request.sampling", f"vLLM does not take them: {error}") from None


def attached(params: Any, plan: Plan | None) -> Any:
    """Return a copy of sampling parameters with a plan."""
    from midstream.runtime.frontend.request.call_plan import with_plan

    return with_plan(params, plan)


def _bound(plan: Plan, llm: LLM) -> Plan:
    """Return a plan with all vectors by value.

    Raises:
        SpecError: it has something of which a record has no bits.
    """
    for index, capture in enumerate(plan.captures):
        with at(f"capture[{index}]"):
            if type(capture) is not Capture:
                raise SpecError("", f"expected a `Capture`, got {kind(capture)}: a record has rows")
            if capture.sink != MEMORY:
                raise SpecError("sink", f'expected "memory", got {show(capture.sink)}')
            if capture.reuse:
                raise SpecError("reuse", "expected False: rows are computed again")
    if plan.controller is not None and plan.controller.mode != "sync":
        raise SpecError("controller.mode", 'expected "sync", which acts at given tokens')
    bound = plan.bind(llm.vectors.lookup, llm.info.shape.num_layers)
    return Plan.parse(replace(bound, origins=()).to_dict())


def _result(owner: Any, completion: Any) -> RecordedResult:
    scores, rows = {}, {}
    probes: Any = getattr(owner, "probes", None) or {}
    for name in probes:
        values = np.ascontiguousarray(probes[name].numpy(), "<f4").tobytes()
        scores[name] = RecordedScores(tuple(probes.positions_of(name).tolist()), values)
    activations: Any = getattr(owner, "activations", None)
    for site, layer in activations or ():
        data = np.ascontiguousarray(activations.encoded(site, layer).numpy())
        digests = tuple(hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in data)
        positions = tuple(activations.positions_of(site, layer).tolist())
        rows[f"{site}.{layer}"] = RecordedRows(positions, digests)
    receipt = getattr(owner, "receipt", None)
    tokens = tuple(completion.token_ids)
    chosen = zip(completion.logprobs, tokens, strict=True)
    return RecordedResult(
        tokens,
        tuple(float(of_step[token].logprob) for of_step, token in chosen),
        scores,
        rows,
        "" if receipt is None else receipt_digest(receipt),
    )


def _emit(result: RecordedResult) -> dict[str, Any]:
    return {
        "tokens": list(result.tokens),
        # JSON has no number for some; their names are texts.
        "logprobs": [value if math.isfinite(value) else str(value) for value in result.logprobs],
        "scores": {
            name: {
                "positions": list(scores.positions),
                "f32": base64.b64encode(scores.values).decode(),
                "sha256": scores.sha256,
            }
            for name, scores in result.scores.items()
        },
        "rows": {
            name: {
                "positions": list(rows.positions),
                "digests": " ".join(rows.digests),
                "sha256": rows.sha256,
            }
            for name, rows in result.rows.items()
        },
        "receipt": result.receipt,
    }


def _read_result(value: object) -> RecordedResult:
    names = ("tokens", "logprobs", "scores", "rows", "receipt")
    fields: Any = read_fields(value, required=names, optional=())
    tokens = _read_tokens("tokens", fields["tokens"])
    logprobs = fields["logprobs"]
    if not isinstance(logprobs, list) or len(logprobs) != len(tokens):
        raise SpecError("logprobs", f"expected a list of {len(tokens)} numbers")
    scores, rows = {}, {}
    for name, part in read_fields(fields["scores"], (), tuple(fields["scores"])).items():
        with at(f"scores.{name}"):
            own: Any = read_fields(part, required=("positions", "f32", "sha256"), optional=())
            positions = _read_tokens("positions", own["positions"])
            try:
                values = base64.b64decode(own["f32"], validate=True)
                scores[name] = RecordedScores(positions, values)
                scores[name].numbers()
            except (TypeError, ValueError) as error:
                raise SpecError("f32", f"expected float32 numbers in base64: {error}") from None
            _check_digest(scores[name].sha256, own["sha256"])
    for name, part in read_fields(fields["rows"], (), tuple(fields["rows"])).items():
        with at(f"rows.{name}"):
            own = read_fields(part, required=("positions", "digests", "sha256"), optional=())
            positions = _read_tokens("positions", own["positions"])
            rows[name] = RecordedRows(positions, tuple(str(own["digests"]).split()))
            if len(rows[name].digests) != len(positions):
                raise SpecError("digests", f"expected {len(positions)}")
            _check_digest(rows[name].sha256, own["sha256"])
    numbers = tuple([_read_logprob(number) for number in logprobs])
    return RecordedResult(tokens, numbers, scores, rows, str(fields["receipt"]))


def _read_logprob(value: object) -> float:
    if value not in _NO_NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise SpecError("logprobs", f"expected numbers, got {show(value)}")
    return float(value)


def _read_tokens(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise SpecError(name, f"expected a list of numbers, got {kind(value)}")
    with at(name):
        return tuple(read_count(number, 0) for number in value)


def _check_digest(computed: str, written: object) -> None:
    if computed != written:
        raise SpecError("sha256", f"expected {computed}, that of the values, got {show(written)}")
