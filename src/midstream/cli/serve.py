"""`midstream serve MODEL`: `vllm serve` with midstream enabled."""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Annotated, Any

import typer

from midstream.cli.output import read_json_option, read_names, refuse
from midstream.config.config import KEY, Config
from midstream.config.event_sinks import read_events
from midstream.config.sinks import plain_sinks
from midstream.errors import ConfigError, MissingExtraError
from midstream.validation import closest

# vLLM's group of plugin entry points, and the variable that restricts which ones it loads.
GROUP, PLUGINS = "vllm.general_plugins", "VLLM_PLUGINS"
ADDITIONAL = "--additional-config"
# This command's options, and how alike a word must be to be taken for one.
_OWN, _ALIKE = ("--layers", "--settings", "--sinks", "--sites", "--steering", "--vectors"), 0.8
# vLLM's options that this command looks for: the whole name, the shortest beginning of it that vLLM
# takes for it, and its short name; "": it has none.
_CONFIG = (ADDITIONAL, "--ad", "-ac")
_COUNT = ("--api-server-count", "--api-s", "-asc")
_REPLICAS = ("--data-parallel-size", "--data-parallel-size", "-dp")
_HEADLESS = ("--headless", "--head", "")
CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": ["--help"],
}


def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder or name, as for vllm serve; also --model."),
    ],
    sites: Annotated[
        str | None,
        typer.Option("--sites", "--site", help="Sites to tap, comma-separated. [resid_post]"),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers", "--layer", help="Layers to tap: all, or comma-separated indices. [all]"
        ),
    ] = None,
    vectors: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="Register the vectors of a file; repeatable."),
    ] = None,
    steering: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Edits of every request, by tier: \'{"base": ["happy", 2.0]}\'.',
        ),
    ] = None,
    sinks: Annotated[
        list[str] | None,
        typer.Option(
            "--sinks",
            "--capture-consumers",
            help="A sink, as name or name:setting=value,setting=value. Give it once per sink.",
        ),
    ] = None,
    settings: Annotated[
        str | None, typer.Option(help="Other settings of midstream, as a JSON object.")
    ] = None,
) -> None:
    """Serve a model with vLLM and midstream.

    All other options are passed to `vllm serve`: --port, --api-key, --dtype, …
    midstream's settings may also be in its --config FILE; options of this command take precedence.

    Example: midstream serve org/model --sites resid_post,mlp_out --port 8000
    """
    options = read_json_option("--settings", settings) if settings is not None else {}
    if not isinstance(options, dict):
        raise typer.BadParameter(f"--settings: expected a JSON object, got {settings}")
    if sites is not None:
        options["sites"] = read_names(sites)
    if layers is not None:
        options["layers"] = layers if layers == "all" else _indices(layers)
    if vectors:
        options["vectors"] = dict(named_file(word) for word in vectors)
    if steering is not None:
        options["steering"] = read_json_option("--steering", steering)
    # Replace this process, so that signals and the exit status are the server's.
    os.execv(sys.executable, server_command(model, options, context.args, sinks))


def server_command(
    model: str, settings: dict[str, Any], words: list[str], sinks: list[str] | None = None
) -> list[str]:
    """Return the command of vLLM's server with midstream, `words` for it and more `sinks`."""
    _check_spelling(words)
    words, in_file = _read_config_file(words)
    words, additional = _take_additional_config(words, in_file)
    in_additional = additional.pop(KEY, {})
    if not isinstance(in_additional, dict):
        raise typer.BadParameter(
            f"{ADDITIONAL} in --config: expected an object of settings as {KEY!r}, "
            f"got {in_additional!r}"
        )
    settings = _merged(in_additional, settings)
    try:
        if sinks:
            settings["sinks"] = {**plain_sinks(settings.get("sinks", {})), **plain_sinks(sinks)}
        configured = Config.parse(settings)
        if configured.sinks:
            # Else a wrong name is found when the engine has started.
            from midstream.runtime.vllm.additional_config import check_sinks

            own = configured.sinks.items()
            check_sinks({name: sink for name, sink in own if "class" not in sink})
        if configured.events:
            from midstream.sinks.events import EventLog

            EventLog(read_events(configured.events)).close()
    except (ConfigError, MissingExtraError) as error:
        raise refuse(str(error), as_json=False) from None
    words += [ADDITIONAL, json.dumps({**additional, KEY: settings})]
    given = [*words, *(f"--{name}" for name in in_file)]
    is_explicit = _has(given, _COUNT) or _has(given, _HEADLESS)
    # By default vLLM starts a front end per replica, and each would have its part of the capacity.
    count = ["--api-server-count", "1"] if _has(given, _REPLICAS) and not is_explicit else []
    rest = [*words, *count]
    if not entry_points(group=GROUP, name=KEY):
        raise refuse(
            "midstream is not installed as a package, so vLLM cannot load it; pip install it in "
            "vLLM's environment",
            as_json=False,
        )
    named = os.environ.get(PLUGINS)
    if named is not None and KEY not in named.split(","):
        os.environ[PLUGINS] = ",".join(filter(None, [*named.split(","), KEY]))
    return [sys.executable, "-m", *_server(model, rest), *rest]


def _has(arguments: list[str], option: tuple[str, str, str]) -> bool:
    return any(_means(word.partition("=")[0], option) for word in arguments)


def _means(word: str, option: tuple[str, str, str]) -> bool:
    """Return whether a word is an option, without its value: its name or a beginning of it."""
    whole, shortest, short = option
    name = word.replace("_", "-")
    is_long = name.startswith(shortest) and whole.startswith(name)
    return is_long or (bool(short) and name == short)


def _server(model: str, arguments: list[str]) -> list[str]:
    """Return the module of vLLM's server and its first arguments."""
    MissingExtraError.require("vllm", "midstream serve")
    try:
        version("vllm")
    except PackageNotFoundError:
        # vLLM's command needs its package metadata, which CPU builds have under another name; its
        # server module does not, but starts one API server process only.
        if _has(arguments, _COUNT):
            return ["midstream.cli.vllm_serve", "serve", model]
        return ["vllm.entrypoints.openai.api_server", "--model", model]
    return ["vllm.entrypoints.cli.main", "serve", model]


def _read_config_file(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return arguments, `--config FILE` as two, and that file's options, which must be merged."""
    split: list[str] = []
    for word in words:
        split += word.split("=", 1) if word.startswith("--config=") else [word]
    if "--config" not in split:
        return split, {}
    path = "".join(split[split.index("--config") + 1 :][:1])
    yaml: Any = importlib.import_module("yaml")  # vLLM brings it

    try:
        with open(path, encoding="utf-8") as file:
            options = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"--config {path}: cannot be read: {error}") from None
    if not isinstance(options, dict):
        raise typer.BadParameter(f"--config {path}: expected options and their values")
    return split, {str(name).replace("_", "-"): value for name, value in options.items()}


def _take_additional_config(
    words: list[str], in_file: dict[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Return arguments without `--additional-config`, and its value with the file's."""
    additional: dict[str, Any] = {}
    for name, value in in_file.items():
        if _is_additional(f"--{name}"):
            _check_whole(name)
            # vLLM takes a mapping, or JSON as text.
            additional = _merged(additional, _object(value))
    left: list[str] = []
    rest = iter(words)
    for word in rest:
        option, is_one_word, value = word.partition("=")
        if not _is_additional(option):
            left.append(word)
            continue
        _check_whole(option)
        there = _object(value if is_one_word else next(rest, ""))
        if KEY in there:
            raise typer.BadParameter(
                f"{ADDITIONAL}: expected a JSON object without {KEY!r}; use this command's options "
                "for midstream's settings"
            )
        additional = _merged(additional, there)
    return left, additional


def _is_additional(option: str) -> bool:
    """Return whether an option is `--additional-config`, a part of it, or short for it."""
    return _means(option.partition(".")[0], _CONFIG)


def _check_whole(option: str) -> None:
    if "." in option:
        raise typer.BadParameter(
            f"{option}: expected {ADDITIONAL} with a whole JSON object; use this command's options "
            "for midstream's settings"
        )


def _object(value: object) -> dict[str, Any]:
    parsed = read_json_option(ADDITIONAL, value) if isinstance(value, str) else value
    if not isinstance(parsed, dict):
        raise typer.BadParameter(f"{ADDITIONAL}: expected a JSON object, got {parsed!r}")
    return parsed


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of both; those of the second take precedence, field by field."""
    merged = dict(first)
    for name, value in second.items():
        before = merged.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            # A tier is one value: a mixture of two would be neither's.
            value = {**before, **value} if name == "steering" else _merged(before, value)
        merged[name] = value
    return merged


def named_file(word: str) -> tuple[str, str]:
    name, equals, file = word.partition("=")
    if not equals or not name or not file:
        raise typer.BadParameter(f"--vectors: expected NAME=FILE, got {word!r}")
    if not os.path.isfile(file):  # else it is found when vLLM has been imported
        raise typer.BadParameter(f"--vectors {name}: there is no file {file!r}")
    return name, file


def _check_spelling(words: list[str]) -> None:
    """Refuse misspelt options of midstream's, which vLLM would answer with all of its own."""
    for word in words:
        option = word.partition("=")[0]
        close = closest(option, _OWN, _ALIKE) if option.startswith("--") else ""
        if close:
            raise typer.BadParameter(f"no such option: {option}; did you mean {close}?")


def _indices(text: str) -> list[int]:
    try:
        return [int(index) for index in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"--layers: expected all or comma-separated indices, got {text!r}"
        ) from None
