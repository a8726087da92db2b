"""`midstream serve MODEL`: `vllm serve` with midstream enabled."""

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

# vLLM's group of plugin entry points, and the variable that restricts which ones it loads.
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
        str | None, typer.Option(help="Sites to tap, comma-separated. [resid_post]")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers to tap: all, or comma-separated indices. [all]")
    ] = None,
    settings: Annotated[
        str | None, typer.Option(help="Other settings of midstream, as a JSON object.")
    ] = None,
) -> None:
    """Serve a model with vLLM and midstream.

    All other options are passed to `vllm serve`: --port, --api-key, --dtype, …
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
    _enable_plugin()
    # Replace this process, so that signals and the exit status are the server's.
    os.execv(sys.executable, [sys.executable, "-m", *_server(model), *rest])


def _enable_plugin() -> None:
    """Make sure that vLLM loads midstream: check that the plugin is installed, and add it to
    `VLLM_PLUGINS` if that is set.
    """
    if not entry_points(group=GROUP, name=KEY):
        typer.echo(
            "error: midstream is not installed as a package, so vLLM cannot load it; "
            "pip install it in vLLM's environment",
            err=True,
        )
        raise typer.Exit(2)
    named = os.environ.get(PLUGINS)
    if named is not None and KEY not in named.split(","):
        os.environ[PLUGINS] = ",".join(filter(None, [*named.split(","), KEY]))


def _one_front_end(given: list[str]) -> list[str]:
    """Return arguments for a single API server process, if the server has replicas.

    midstream needs a single API server; vLLM starts one per replica by default.
    """
    named = {word.partition("=")[0].replace("_", "-") for word in given}
    has_replicas = named & {"--data-parallel-size", "-dp"}
    is_explicit = named & {"--api-server-count", "-asc", "--headless"}
    return ["--api-server-count", "1"] if has_replicas and not is_explicit else []


def _server(model: str) -> list[str]:
    """Return the module of vLLM's server and its first arguments."""
    try:
        version("vllm")
    except PackageNotFoundError:
        # vLLM's command needs its package metadata, which CPU builds have under another name; its
        # server module does not.
        return ["vllm.entrypoints.openai.api_server", "--model", model]
    return ["vllm.entrypoints.cli.main", "serve", model]


def _with_config(rest: list[str], given: dict[str, object]) -> list[str]:
    """Return vLLM's arguments with midstream's settings in `--additional-config`."""
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
                f"{name}: expected a JSON object without {KEY!r}; use this command's options for "
                "midstream's settings"
            )
        before, after = rest[:place], rest[place + (1 if is_one_word else 2) :]
        return [*before, name, json.dumps({**there, KEY: given}), *after]
    return [*rest, name, json.dumps({KEY: given})]


def _indices(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"--layers: expected all or comma-separated indices, got {text!r}"
        ) from None
