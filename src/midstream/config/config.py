"""midstream's settings, their defaults and sources. They are in vLLM's `additional_config`, which
is hashed with compiled graphs: none without taps is loaded with taps, or the reverse.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field, to_builtins

from midstream import sites
from midstream.config.controllers import plain_controllers
from midstream.config.event_sinks import plain_events
from midstream.config.http import Count, plain_http, read_http
from midstream.config.sinks import plain_sinks
from midstream.config.steering import WEIGHTS, plain_steering, plain_vectors, plain_weights
from midstream.errors import ConfigError, SpecError
from midstream.plan.readouts.capture import SHARDED, Return
from midstream.plan.selection import WIDE, unknown_site
from midstream.sites import Tap
from midstream.validation import (
    at,
    read_count,
    read_json,
    read_mapping,
    read_struct,
    setting,
    show,
)
from midstream.version import __version__

KEY = "midstream"
ENVIRONMENT_VARIABLE = "MIDSTREAM"
# Increase when the op's arguments or buffers change meaning: it separates cached compiled graphs.
OP_SCHEMA = 10
STAMP = {"version": __version__, "op_schema": OP_SCHEMA}
Amount = Annotated[int, Meta(ge=0)]
Dose = Annotated[float, Meta(gt=0)]


class Config(Struct, frozen=True, rename={"return_": "return"}):
    """Sites and layers to tap, and capacity limits.

    Attributes:
        sites: the sites to tap, by name. A request can only use tapped sites; each tapped site
            costs a little in every step.
        layers: the layers to tap: "all", or indices from 0 (negative: from the end).
        bank_rows: maximum number of distinct vectors in use by running requests. Each takes 4 ·
            hidden bytes on the device.
        programs: maximum number of distinct combinations of edits (and of captures) in use.
        max_edits: maximum number of instructions in use, counted once per distinct program. An edit
            is one or more instructions, a probe is one, or one for each class, query, value and
            hidden unit.
        edits_per_site: maximum number of instructions for one token at one site.
        probes: maximum number of scores for one token: those of probes, with one for each class,
            query, value and hidden unit, and of gates that read an earlier site. Each takes 4 bytes
            on the device per token of a step.
        unscored_tokens: what happens to tokens of a prompt that the prefix cache has without their
            score, as no earlier request had the probe. "compute": they are computed once more.
            "skip": the cache serves them, and they are scored from the next computed token on. The
            score of each is then NaN, which meets no condition, and the receipt, with status
            `partial`, counts them.
        doses: number of edits of a request, one for each layer, whose dose is measured: how long
            the change of a token's vector is, relative to the vector before it; see `Dose`. Each
            takes 4 bytes on the device per token of a step. On a GPU, steps of 256 sequences with
            edits at all layers of an 8B model took 7 to 8 % longer with 64. 0: none is measured.
        warn_dose: mean dose above which an edit raises a `ScaleWarning`, once per process for its
            place in the request, site and layer. None: never.
        max_dose: largest dose of a token. A request with a larger one ends, its receipt has a
            problem, and the prefix cache is emptied; a stage before the last of a pipeline reports
            it when the request has ended. A request with an edit that has no dose, or none within
            `doses`, is rejected. None: there is no bound.
        token_ids: maximum number of token ids in use in lists of token ids to edit at.
        maps: maximum number of distinct matrices of `Affine(matrix=…)` in use by running requests.
            Each takes 4 · hidden² bytes on the device, in addition to `bank_rows`, and on a GPU all
            together 4 · hidden per token of a step. 0: such edits are rejected.
        gate_states: maximum number of states of gates with memory (`hold`, `smooth`, `release`) in
            all running requests: one for each gate and tap that it reads. Each takes a few hundred
            bytes on the device; above 0, each tap launches one kernel more on a GPU. A request that
            would exceed it together with others waits in the front end. 0: such gates are rejected.
        readout_rows: maximum number of rows that lenses and SAEs of all running requests may read
            in one step: positions times layers. All requests of a step wait for this work. A
            request that would exceed it together with others waits in the front end. Generated
            tokens that are computed again after a preemption are not counted.
        readout_bytes: device memory on each rank for registered lenses and SAEs (`llm.lenses`,
            `llm.saes`), taken before the KV cache is sized. A lens takes width² numbers of the
            model's dtype for each layer, an SAE 4 · features · (width + 2) bytes.
        reconstruct: where SAEs may reconstruct vectors (`Reconstruct`): the largest number of
            features of an SAE by site and layer, such as `{"resid_post:12": 16384}`; of a
            transcoder, what it reads. SAEs of these places are stored with their decoders, in
            `readout_bytes`: 8 · features · (width + 1) bytes each. All places together take
            4 · width bytes per token of a step on the device, and on a GPU 256 MiB.
        reductions: maximum number of vectors of sums of running requests that reduce rows: one for
            each layer of a mean or maximum, three of moments. Each takes 8 · hidden bytes on the
            device, taken before the KV cache is sized. A request that would exceed it together with
            others waits in the front end.
        device_rows: maximum number of rows that stay on the device by `Capture(reduce="device")`,
            one for each token and layer, until the results of their requests are dropped. Each
            takes a vector of the model's dtype on the device, taken before the KV cache is sized. A
            request that would exceed it together with others is rejected. 0: such captures are
            rejected.
        reuse_bytes: host memory of the front end for rows of `Capture(reuse=True)`, which later
            requests with the same tokens and edits get in place of computing them. Beyond it, those
            of the least recently used tokens are forgotten. 0: such captures are rejected.
        staging_bytes: size of the staging ring on the device, through which captured vectors are
            transferred. None: enough for every token of the largest step at every tapped site, on a
            GPU twice that (rows are transferred while the next step fills the ring), but at most
            1/16 of the device's memory (2 GiB on a CPU).
        arena_bytes: maximum host memory for captured rows, per worker, until they are read or
            freed. None: a quarter of the free memory, at most 64 GiB, over all workers.
        overflow: what happens to captured rows beyond `arena_bytes`. "block": requests wait in the
            front end for capacity; "spill": rows go to unnamed files in `spill_dir`; "drop": the
            newest requests lose their rows, so that the others keep all of theirs, and their
            receipts, with status `partial`, report how many.
        spill_dir: folder for spilled rows; None: the system's folder for temporary files.
        codec: default encoding of captured vectors on the device: "raw", or a lossy codec, see
            `midstream.codecs`.
        return_: default for which ranks of a tensor-parallel group transfer captured vectors:
            "sharded", each its share, or "gathered", the first rank all; see `Capture`. The key in
            a dict is `return`.
        check_ranks: debugging aid: each worker checksums its requests and steps, and the front end
            compares the checksums whenever it fetches results. A difference raises `RankError`.
        on_mismatch: what happens if a request's receipt has problems. "raise": raise
            `ReceiptError`, which has the outputs of the call. "warn": issue a `ReceiptWarning` and
            return the outputs; the receipts concerned have the status `error`.
        on_nonfinite: what happens to a request with an infinite or NaN value in an edited or
            captured row or in a score, or with an edit that saturated. "raise": it ends, and its
            receipt has a problem. "report": it runs on, and the receipt, with status `partial`,
            reports the positions. Its KV is never served to other requests.
        tapped_model: when the tapped model is compiled, and its CUDA graphs are captured. It has
            the same weights as vLLM's own model, which runs all steps in which no token is
            captured, edited or probed. "startup": while the engine starts. "lazy": when the first
            request needs it; all requests wait for that. "always": every step runs the tapped
            model, and vLLM's own is not compiled; a request's rounding is then the same whatever
            other requests ask for. "exact": the same, and the engine starts only with vLLM's batch
            invariance (VLLM_BATCH_INVARIANT=1, on a GPU): tokens and logprobs of a request are then
            the same bits whether it is captured or not, and whatever else runs.
        hooks: "local": requests from Python may have edits by Python functions, see `Local`. The
            engine then runs eagerly, without compilation and CUDA graphs, as if `enforce_eager`
            were set. "off": such edits are rejected.
        controllers: Python code that requests may name as their controller, by name:
            "package.module:Name" of a class or function, or a dict of `path`, `scales` (what it may
            answer, besides 0 and 1), `seconds` (the longest time that a step waits for it, default
            0.1) and `on_error`; see `Controller`. It runs in the engine core's process.
        sinks: sinks for captured rows besides the request's output: settings by name, such as
            `{"store": {"root": "acts"}}`, or one string `"filesystem:root=acts"`.
        vectors: named vectors from the start: paths of `.safetensors`, `.npz`, `.gguf` or `.json`
            files by name, such as `{"happy": "happy.safetensors"}`.
        lenses: lenses from the start: folders of `TunedLens.load` and files of `JacobianLens.load`
            by name, such as `{"tuned": "lenses/tuned"}`. Their memory is `readout_bytes`.
        saes: sparse autoencoders from the start: what `SAE.load` reads by name, such as
            `{"layer-12": "saes/layer-12"}`. Their memory is `readout_bytes`.
        steering: server-wide edits from the start, by tier (`base`, `prompt`, `generated`), in the
            forms of `llm.steering.set`, such as `{"base": ["happy", 2.0]}`.
        events: where a server sends the events of its guards, besides the log: settings by sink,
            such as `{"jsonl": {"path": "/var/log/guards.jsonl"}}`; see
            `midstream.config.event_sinks`.
        http: settings of `vllm serve` for HTTP clients, see `midstream.config.http`; False:
            midstream is disabled over HTTP.
    """

    sites: tuple[str, ...] = ("resid_post",)
    layers: tuple[int, ...] | str = "all"
    bank_rows: Count = 4096
    programs: Annotated[int, Meta(ge=4)] = 2048
    max_edits: Count = 65536
    edits_per_site: Count = 64
    probes: Count = 16
    unscored_tokens: Literal["compute", "skip"] = "compute"
    doses: Amount = 0
    warn_dose: Dose | None = 2.0
    max_dose: Dose | None = None
    token_ids: Count = 16384
    maps: Amount = 0
    gate_states: Amount = 0
    readout_rows: Count = 16384
    readout_bytes: Amount = 0
    reconstruct: Mapping[str, int] = field(default_factory=dict)
    reductions: Amount = 256
    device_rows: Amount = 1024
    reuse_bytes: Amount = 0
    staging_bytes: Count | None = None
    on_mismatch: Literal["raise", "warn"] = "raise"
    on_nonfinite: Literal["raise", "report"] = "raise"
    arena_bytes: Count | None = None
    overflow: Literal["block", "spill", "drop"] = "block"
    spill_dir: str | None = None
    codec: str = "raw"
    return_: Return = SHARDED
    check_ranks: bool = False
    tapped_model: Literal["startup", "lazy", "always", "exact"] = "startup"
    hooks: Literal["off", "local"] = "off"
    controllers: Mapping[str, Any] = field(default_factory=dict)
    sinks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    vectors: Mapping[str, str] = field(default_factory=dict)
    lenses: Mapping[str, str] = field(default_factory=dict)
    saes: Mapping[str, str] = field(default_factory=dict)
    steering: Mapping[str, Any] = field(default_factory=dict)
    events: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    http: bool | Mapping[str, Any] = True

    @staticmethod
    @setting(KEY)
    def parse(value: object) -> Config:
        """Create settings from a Config or a dict of its fields.

        Raises:
            ConfigError: an unknown setting, an invalid value, or settings of another version.
        """
        if isinstance(value, Config):
            # A Config created directly is not validated: validate it like a dict.
            names = zip(Config.__struct_encode_fields__, Config.__struct_fields__, strict=True)
            value = {name: getattr(value, attribute) for name, attribute in names}
        settings = dict(read_mapping(value, "a dict of settings"))
        stamp = settings.pop("stamp", STAMP)
        if stamp != STAMP:
            raise SpecError(
                "stamp",
                f"this process runs midstream {STAMP}, the engine was configured by {stamp}; "
                "install the same version everywhere",
            )
        for name, plain in _PLAIN.items():
            if name in settings:
                with at(name):
                    settings[name] = plain(settings[name])
        return read_struct(Config, settings)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values with the version's stamp; `Config.parse` accepts them."""
        plain = to_builtins(self)
        plain["sites"] = list(self.sites)
        plain["layers"] = self.layers if isinstance(self.layers, str) else list(self.layers)
        return {**plain, "stamp": dict(STAMP)}

    @property
    def reconstructed(self) -> dict[Tap, int]:
        """The setting `reconstruct` by (canonical site, layer)."""
        counts = {}
        for place, features in self.reconstruct.items():
            site, layer = place.split(":")
            counts[site, int(layer)] = features
        return counts

    def resolve_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers to tap, ascending, for a model of `num_layers` layers."""
        if isinstance(self.layers, str):
            return tuple(range(num_layers))
        resolved = []
        for layer in self.layers:
            index = layer + num_layers if layer < 0 else layer
            if not 0 <= index < num_layers:
                raise ConfigError(
                    f"{KEY}.layers: {layer} is out of range: the model has {num_layers} layers, "
                    f"0 to {num_layers - 1}"
                )
            if index in resolved:
                raise ConfigError(f"{KEY}.layers: layer {index} is listed twice")
            resolved.append(index)
        return tuple(sorted(resolved))


def from_environment() -> Config | None:
    """Return the settings in `MIDSTREAM`: unset, empty or 0: None; 1: the defaults; or JSON."""
    text = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if text in ("", "0"):
        return None
    if text == "1":
        return Config()
    try:
        value = read_json(text)
    except SpecError as error:
        raise ConfigError(
            f"{ENVIRONMENT_VARIABLE}: expected 0, 1 or a JSON object of settings, got "
            f"{show(text)}: {error}"
        ) from None
    return Config.parse(value)


def from_additional_config(additional_config: object) -> Config | None:
    """Return the settings in vLLM's `additional_config`; None if midstream is not enabled."""
    if not is_enabled(additional_config):
        return None
    assert isinstance(additional_config, Mapping)
    return Config.parse(additional_config[KEY])


def is_enabled(additional_config: object) -> bool:
    """Return whether vLLM's `additional_config` enables midstream. Called for every request."""
    value = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    return value is not None and value is not False


def is_complete(additional_config: Mapping[str, Any]) -> bool:
    """Return whether a front end with midstream loaded has completed the settings."""
    value = additional_config.get(KEY)
    return isinstance(value, Config) or (isinstance(value, Mapping) and "stamp" in value)


def _codec(value: object) -> str:
    if value == "raw":
        return "raw"
    from midstream.codecs import parse_codec

    return parse_codec(value).spec


def _http(value: object) -> object:
    return True if value is True else plain_http(read_http(value))


def _sites(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names:
        raise SpecError("", f"expected one or more site names, got {show(value)}")
    site_names: list[str] = []
    for name in names:
        canonical = sites.canonical(name) if isinstance(name, str) else None
        if canonical is None:
            raise SpecError("", unknown_site(name))
        if canonical in site_names:
            raise SpecError("", f"{canonical} is listed twice")
        site_names.append(canonical)
    return tuple(sorted(site_names, key=sites.NAMES.index))


def _reconstruct(value: object) -> dict[str, int]:
    counts = {}
    places = read_mapping(value, "a dict of numbers of features by site and layer")
    for place, features in places.items():
        site, _, layer = place.partition(":") if isinstance(place, str) else ("", "", "")
        name = sites.canonical(site)
        if name not in WIDE or not layer.isdecimal():
            raise SpecError(
                "",
                f"expected places such as resid_post:12, of {', '.join(WIDE)}, and a layer from "
                f"0, got {show(place)}",
            )
        key = f"{name}:{int(layer)}"
        if key in counts:
            raise SpecError("", f"{key} is listed twice, the second time as {show(place)}")
        with at(place):
            counts[key] = read_count(features)
    return counts


def _layers(value: object) -> object:
    if value in ("all", ["all"], ("all",)):
        return "all"
    if not isinstance(value, (list, tuple)) or not value:
        raise SpecError("", f'expected "all" or a list of indices, got {show(value)}')
    return value


# What a setting is made of before its type is checked.
_PLAIN: dict[str, Callable[[Any], object]] = {
    "sites": _sites,
    "layers": _layers,
    "codec": _codec,
    "reconstruct": _reconstruct,
    "controllers": plain_controllers,
    "sinks": plain_sinks,
    "vectors": plain_vectors,
    **{name: partial(plain_weights, name) for name in WEIGHTS},
    "steering": plain_steering,
    "events": plain_events,
    "http": _http,
}
