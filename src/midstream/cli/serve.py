"""`midstream serve MODEL`: `vllm serve` with midstream enabled; everything else is passed on."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Annotated

import typer

from midstream.cli.output import read_json_option
from midstream.config.config import KEY, Config
from midstream.errors import ConfigError

# Where vLLM looks for plugins, and the variable that says which of them it takes.
GROUP, PLUGINS = "vllm.general_plugins", "VLLM_PLUGINS"
CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": ["--help"],
}


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder or name, as for vllm serve.")],
    sites: Annotated[
        str | None, typer.Option(help="Sites to tap, with commas between. [resid_post]")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers to tap: all, or indices with commas between. [all]")
    ] = None,
    settings: Annotated[
        str | None, typer.Option(help="midstream's other settings, as a JSON object.")
    ] = None,
) -> None:
    """Serve a model with vLLM, and midstream enabled.

    All other options are those of `vllm serve`, and are passed on: --port, --api-key, --dtype, …
    """
    given = read_json_option("--settings", settings) if settings is not None else {}
    if not isinstance(given, dict):
        raise typer.BadParameter(f"--settings: expected a JSON object, got {settings}")
    if sites is not None:
        given["sites"] = [name.strip() for name in sites.split(",")]
    if layers is not None:
        given["layers"] = layers if layers == "all" else _indices(layers)
    try:
        Config.parse(given)
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    rest = [*_with_config(list(context.args), given), *_one_front_end(context.args)]
    _have_vllm_load_it()
    # The server takes this process's place: signals and the exit status are its own.
    os.execv(sys.executable, [sys.executable, "-m", *_server(model), *rest])


def _have_vllm_load_it() -> None:
    """Sees that the server will know of midstream: it finds plugins by what is installed, and takes
    those alone that `VLLM_PLUGINS` names, where that is set.
    """
    if not entry_points(group=GROUP, name=KEY):
        typer.echo(
            "error: midstream is not installed as a package, so vLLM would not load it: "
            "pip install it in the environment of vLLM",
            err=True,
        )
        raise typer.Exit(2)
    named = os.environ.get(PLUGINS)
    if named is not None and KEY not in named.split(","):
        os.environ[PLUGINS] = ",".join(filter(None, [*named.split(","), KEY]))


def _one_front_end(given: list[str]) -> list[str]:
    """How many processes answer, for a server with replicas: midstream needs one, and vLLM starts
    as many as there are replicas where it is not told.
    """
    named = {word.partition("=")[0].replace("_", "-") for word in given}
    has_replicas = named & {"--data-parallel-size", "-dp"}
    is_told = named & {"--api-server-count", "-asc", "--headless"}
    return ["--api-server-count", "1"] if has_replicas and not is_told else []


def _server(model: str) -> list[str]:
    """vLLM's server, as a module with its first arguments."""
    try:
        version("vllm")
    except PackageNotFoundError:
        # Its command asks for that, and builds for the CPU have another name; its server does not.
        return ["vllm.entrypoints.openai.api_server", "--model", model]
    return ["vllm.entrypoints.cli.main", "serve", model]


def _with_config(rest: list[str], given: dict[str, object]) -> list[str]:
    """vLLM's arguments with midstream's settings among them."""
    name = "--additional-config"
    for place, word in enumerate(rest):
        option, is_one_word, value = word.partition("=")
        if option.replace("_", "-") != name:
            continue
        if not is_one_word:
            value = rest[place + 1] if place + 1 < len(rest) else ""
        there = read_json_option(name, value)
        if not isinstance(there, dict) or KEY in there:
            raise typer.BadParameter(
                f"{name}: expected a JSON object without {KEY!r}, whose settings have options here"
            )
        before, after = rest[:place], rest[place + (1 if is_one_word else 2) :]
        return [*before, name, json.dumps({**there, KEY: given}), *after]
    return [*rest, name, json.dumps({KEY: given})]


def _indices(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"--layers: expected all or indices with commas between, got {text!r}"
        ) from None
