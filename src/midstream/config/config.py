"""midstream's settings: what they are, their defaults, and where they are read from.

They live in vLLM's `additional_config` under the key `midstream`, and nowhere else: that is part
of the hash under which vLLM caches compiled graphs, so a graph compiled without taps is never
loaded with them, nor the reverse. The environment variable `MIDSTREAM` is only another way of
writing them: it is copied there before the engine's config is made.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from midstream import sites
from midstream.errors import ConfigError
from midstream.spec.capture import RETURNS, SHARDED
from midstream.version import __version__

KEY = "midstream"
ENVIRONMENT_VARIABLE = "MIDSTREAM"
# Raised whenever the op's arguments or buffers change meaning: it keeps compiled graphs apart.
OP_SCHEMA = 2
# Settings that say how much there is room for, and the least that works.
_LEAST = {
    "bank_rows": 1,
    "programs": 4,
    "max_edits": 1,
    "edits_per_site": 1,
    "probes": 1,
    "token_ids": 1,
}
OVERFLOW = ("block", "spill", "drop")
STAMP = {"version": __version__, "op_schema": OP_SCHEMA}


@dataclass(frozen=True, slots=True)
class Config:
    """What to tap, and how much room there is.

    Attributes:
        sites: the sites to tap, by name. A request can only use what is tapped; each tapped site
            costs a little in every step.
        layers: the layers to tap: "all", or indices from 0 (negative: from the end).
        bank_rows: how many distinct vectors the running requests may use together. Each takes
            4 · hidden bytes on the device.
        programs: how many distinct combinations of edits (and of captures) may be in use together.
        max_edits: how many instructions (an edit is one or more, a probe one) may be in use
            together, counted once for each distinct program.
        edits_per_site: how many instructions one token may have at one site.
        probes: how many scores one token may have: probes, and those of gates that read an
            earlier site. Each takes 4 bytes on the device for each token of a step.
        token_ids: how many token ids may be in use together in lists of such to edit at.
        staging_bytes: size of the ring on the device through which captured vectors leave. None:
            enough for every token of the largest step at every tapped site, on a GPU twice that
            (rows leave while the next step fills it), but no more than 1/16 of the device's
            memory (2 GiB on a CPU).
        arena_bytes: how much memory of the machine captured rows may take, on each worker, until
            they are read or let go. None: a quarter of what is free, and no more than 64 GiB, over
            all workers.
        overflow: what happens to more than that. "block": requests wait for room, in the front end;
            "spill": it lies on disk, in files without a name in `spill_dir`; "drop": it is lost,
            and the receipt, with status `partial`, says how much.
        spill_dir: a folder; None: the system's for temporary files.
        codec: how captured vectors leave the device where a request does not say: "raw", or
            reduced, see `midstream.codecs`.
        return_: through which ranks of a tensor-parallel group they leave where a request does not
            say: "sharded", each moves its share, or "gathered", the first moves all; see `Capture`.
            In a dict the setting is `return`.
        check_ranks: for tests and for looking into a fault: every worker keeps a checksum over what
            requests asked for and over each step, and the front end holds them against each other
            whenever it fetches results. A difference is a `RankError`.
        on_mismatch: what happens when a request's receipt shows that not all was done as asked.
            "raise": `ReceiptError`, which has the outputs of the call. "warn": a `ReceiptWarning`,
            and the outputs are returned; those concerned have a receipt with status `error`.
        sinks: where captured rows may go besides the output of their request, by name, each with
            its settings: `{"store": {"root": "acts"}}`, or in one word `"filesystem:root=acts"`.
        http: of `vllm serve`: what it lets clients ask for, and how much it keeps for them, see
            `midstream.config.http`; False: it serves nothing of midstream's.
    """

    sites: tuple[str, ...] = ("resid_post",)
    layers: tuple[int, ...] | str = "all"
    bank_rows: int = 4096
    programs: int = 2048
    max_edits: int = 65536
    edits_per_site: int = 64
    probes: int = 16
    token_ids: int = 16384
    staging_bytes: int | None = None
    on_mismatch: str = "raise"
    arena_bytes: int | None = None
    overflow: str = "block"
    spill_dir: str | None = None
    codec: str = "raw"
    return_: str = SHARDED
    check_ranks: bool = False
    sinks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    http: bool | Mapping[str, Any] = True

    @staticmethod
    def parse(value: object) -> Config:
        """Settings from a Config or a dict of its fields.

        Raises:
            ConfigError: an unknown setting, or a value that is not allowed.
        """
        if isinstance(value, Config):
            # Made directly, it may hold anything: it is read like a dict.
            value = {_said(each.name): getattr(value, each.name) for each in fields(Config)}
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{KEY}: expected a dict of settings, got `{type(value).__name__}` {value!r}; "
                f"use {{}} for the defaults"
            )
        given = dict(value)
        stamp = given.pop("stamp", STAMP)
        if stamp != STAMP:
            raise ConfigError(
                f"{KEY}.stamp: this process runs midstream {STAMP}, the engine was configured by "
                f"{stamp}; install the same version everywhere"
            )
        known = {_said(each.name) for each in fields(Config)}
        for name in given:
            if name not in known:
                raise ConfigError(f"{KEY}.{name}: no such setting{hint(name, known)}")
        for name, least in _LEAST.items():
            if name in given:
                given[name] = _count(name, given[name], least)
        if given.get("staging_bytes") is not None:
            given["staging_bytes"] = _count("staging_bytes", given["staging_bytes"], 1)
        if given.get("arena_bytes") is not None:
            given["arena_bytes"] = _count("arena_bytes", given["arena_bytes"], 1)
        if given.get("overflow", "block") not in OVERFLOW:
            raise ConfigError(
                f"{KEY}.overflow: expected one of {', '.join(OVERFLOW)}, got {given['overflow']!r}"
            )
        if not isinstance(given.get("spill_dir"), str | None):
            raise ConfigError(
                f"{KEY}.spill_dir: expected the path of a folder, got {given['spill_dir']!r}"
            )
        if given.get("codec", "raw") != "raw":
            given["codec"] = _codec(given["codec"])
        if given.get("return", SHARDED) not in RETURNS:
            raise ConfigError(
                f"{KEY}.return: expected one of {', '.join(RETURNS)}, got {given['return']!r}"
            )
        if not isinstance(given.get("check_ranks", False), bool):
            raise ConfigError(
                f"{KEY}.check_ranks: expected true or false, got {given['check_ranks']!r}"
            )
        if given.get("on_mismatch", "raise") not in ("raise", "warn"):
            raise ConfigError(
                f'{KEY}.on_mismatch: expected "raise" or "warn", got {given["on_mismatch"]!r}'
            )
        if given.get("sinks", {}) != {}:
            from midstream.config.sinks import plain_sinks

            given["sinks"] = plain_sinks(given["sinks"])
        if given.get("http", True) is not True:
            from midstream.config.http import plain_http, read_http

            given["http"] = plain_http(read_http(given["http"]))
        if "sites" in given:
            given["sites"] = _sites(given["sites"])
        if "layers" in given:
            given["layers"] = _layers(given["layers"])
        return Config(**{f"{name}_" if name == "return" else name: given[name] for name in given})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, stamped with the version; `Config.parse` reads them back."""
        plain = {_said(name): value for name, value in asdict(self).items()}
        plain["sites"] = list(self.sites)
        plain["layers"] = self.layers if isinstance(self.layers, str) else list(self.layers)
        return {**plain, "stamp": dict(STAMP)}

    def resolve_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers to tap, in order, for a model of `num_layers`.

        Raises:
            ConfigError: a layer that the model does not have, or one named twice.
        """
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
                raise ConfigError(f"{KEY}.layers: layer {index} is named twice")
            resolved.append(index)
        return tuple(sorted(resolved))


def _said(name: str) -> str:
    """A field as it is written in a dict: one of them is a word of Python's own."""
    return name.removesuffix("_")


def from_environment() -> Config | None:
    """The settings in `MIDSTREAM`: unset, empty or 0: None; 1: the defaults; else a JSON object.

    Raises:
        ConfigError: it is none of these.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if text in ("", "0"):
        return None
    if text == "1":
        return Config()
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{ENVIRONMENT_VARIABLE}: expected 0, 1 or a JSON object of settings, got {text!r}"
        ) from error
    return Config.parse(value)


def from_additional_config(additional_config: object) -> Config | None:
    """The settings in vLLM's `additional_config`; None where midstream is not enabled."""
    if not is_enabled(additional_config):
        return None
    assert isinstance(additional_config, Mapping)
    return Config.parse(additional_config[KEY])


def is_enabled(additional_config: object) -> bool:
    """Whether vLLM's `additional_config` enables midstream. As fast as each request needs it."""
    value = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    return value is not None and value is not False


def is_complete(additional_config: Mapping[str, Any]) -> bool:
    """Whether the settings were completed by a front end that has midstream loaded."""
    value = additional_config.get(KEY)
    return isinstance(value, Config) or (isinstance(value, Mapping) and "stamp" in value)


def _count(name: str, value: object, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{KEY}.{name}: expected `int`, got `{type(value).__name__}` {value!r}")
    if value < at_least:
        raise ConfigError(f"{KEY}.{name}: expected at least {at_least}, got {value}")
    return value


def _codec(value: object) -> str:
    from midstream.codecs import parse_codec
    from midstream.errors import SpecError

    try:
        return parse_codec(value).spec
    except SpecError as error:
        raise ConfigError(f"{KEY}.{error}") from error


def _sites(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names:
        raise ConfigError(f"{KEY}.sites: expected one or more site names, got {value!r}")
    found: list[str] = []
    for name in names:
        canonical = sites.canonical(name) if isinstance(name, str) else None
        if canonical is None:
            raise ConfigError(
                f"{KEY}.sites: unknown site {name!r}; there are {', '.join(sites.NAMES)}"
            )
        if canonical in found:
            raise ConfigError(f"{KEY}.sites: {canonical} is named twice")
        found.append(canonical)
    return tuple(sorted(found, key=sites.NAMES.index))


def _layers(value: object) -> tuple[int, ...] | str:
    if value in ("all", ["all"], ("all",)):
        return "all"
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(f'{KEY}.layers: expected "all" or a list of indices, got {value!r}')
    for layer in value:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise ConfigError(f"{KEY}.layers: expected `int`, got {layer!r}")
    return tuple(value)


def hint(name: object, known: set[str]) -> str:
    """What a setting may have been meant to be, for the end of a message."""
    close = difflib.get_close_matches(str(name), known, n=1)
    listed = ", ".join(sorted(known))
    return f"; did you mean {close[0]}?" if close else f"; there are {listed}"
