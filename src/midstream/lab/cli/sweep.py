"""`midstream sweep PROMPT --source … --metric …`: patch a prompt at each cell of a grid."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from midstream.cli.output import (
    failures,
    print_json,
    read_json_option,
    read_names,
    read_numbers,
    read_positions,
    refusals,
)
from midstream.errors import ConfigError
from midstream.lab.cli.capture import ENVIRONMENT, check_writable, read_layers

if TYPE_CHECKING:
    from rich.console import Console

    from midstream.lab.sweep import Sweep, SweepRequest

# Name of the SAE in an engine of the command.
_NAME = "sae"
_METRICS = {"logprob": 1, "logit-diff": 2, "kl": 0}
# A part of a metric: a JSON text, or anything without a colon.
_PART = re.compile(r'("(?:[^"\\]|\\.)*"|[^:]*)(?::|$)')


def sweep(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] PROMPT",
            help="Folder or name of the model, with --url its name, also --model; and the prompt "
            "that is patched.",
        ),
    ],
    source: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="What its vectors are replaced by: the clean prompt; zero; mean:NAME of a vector "
            "that the server has; JSON, such as token ids; or with --features an activation.",
        ),
    ],
    metric: Annotated[
        str,
        typer.Option(
            help='logit-diff:" Paris":" Tokyo", logprob:" Paris", kl, recovered: before one of '
            "these, or JSON."
        ),
    ],
    url: Annotated[
        str, typer.Option(help="Use this server, whose key is in VLLM_API_KEY, if it has one.")
    ] = "",
    layers: Annotated[
        str,
        typer.Option(
            "--layers",
            "--layer",
            help="Layers, such as 10,20 or -1; or all. Default: all, or --sae's.",
        ),
    ] = "",
    sites: Annotated[
        str,
        typer.Option(
            "--sites",
            "--site",
            help="Sites, such as resid_pre,mlp_out. Default: resid_post, or --sae's.",
        ),
    ] = "",
    positions: Annotated[
        str, typer.Option(help="Positions: prompt, last_prompt, 0,-1, or JSON.")
    ] = "prompt",
    heads: Annotated[
        str, typer.Option(help="Heads at q, k, v and z: all, or numbers such as 0,3.")
    ] = "",
    sae: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="With --features: folder or file of a sparse autoencoder; with --url its name.",
        ),
    ] = "",
    features: Annotated[
        str, typer.Option(help="Features of --sae to patch one by one, such as 7,1207.")
    ] = "",
    align: Annotated[
        str, typer.Option(help="Prompts of different lengths: suffix, prefix, or exact.")
    ] = "exact",
    alpha: Annotated[float, typer.Option(help="Share of the source in the patched vectors.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=0, help="Unpatched runs, for the noise floor.")] = 3,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt and the source are user messages.")
    ] = False,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="Write the sweep as JSON, which Sweep.load reads.")
    ] = "",
    html: Annotated[str, typer.Option(metavar="FILE", help="Write it as one HTML page.")] = "",
    best: Annotated[
        int, typer.Option(min=0, help="Number of cells to print, those with the largest effect.")
    ] = 10,
    dtype: Annotated[str, typer.Option(help="Dtype of the engine.")] = "auto",
    engine_args: Annotated[
        str, typer.Option(metavar="JSON", help="Further arguments of vllm.LLM.")
    ] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="Print only the sweep as JSON.")] = False,
    verbose: Annotated[bool, typer.Option(help="Show vLLM's log.")] = False,
) -> None:
    """Patch a prompt at each layer and position with the vectors of another, and show a metric.

    Activation patching: each cell of the grid is one request that replaces the vectors at one site,
    layer and position. Runs an engine, or uses a server with --url. Exit status: 0 success; 2 the
    sweep was rejected.

    Example: midstream sweep org/model "The capital of France is" --source "The capital of
    Japan is" --metric logprob:" Tokyo"
    """
    arguments = read_json_option("--engine-args", engine_args)
    if not isinstance(arguments, dict):
        raise typer.BadParameter(f"--engine-args: expected a JSON object, got {engine_args}")
    *models, prompt = words
    if len(models) > 1:
        raise typer.BadParameter(f"expected MODEL and PROMPT, got {len(words)} words; quote both")
    model = models[0] if models else ""
    if not (model or url):
        raise typer.BadParameter(
            "MODEL: missing; give it before the prompt or as --model, or use a server with --url"
        )
    if url and (arguments or dtype != "auto"):
        raise typer.BadParameter("--engine-args and --dtype are of an engine; omit them with --url")
    for path in filter(None, (out, html)):
        check_writable(path)
    if out and not out.endswith(".json"):
        raise typer.BadParameter(f"--out: expected a name that ends in .json, got {out}")
    from midstream.console import defaults, quiet

    with refusals(as_json):
        from midstream.lab.sweep import SweepRequest

        request = SweepRequest(
            _as_chat(read_source_option(source, of_features=bool(features)), chat),
            read_metric_option(metric),
            layers=read_layers(layers) if layers else None,
            sites=read_names(sites) or None,
            positions=read_positions(positions),
            heads="all" if heads == "all" else read_numbers("--heads", heads),
            sae=(sae if url else _NAME) if sae else None,
            features=read_numbers("--features", features),
            align=align,
            alpha=alpha,
            repeats=repeats,
        )
        patched_prompt = _as_chat(prompt, chat)
        if url:
            from rich.console import Console

            console = Console(stderr=True)
            result = _of_server(url, model, patched_prompt, request, console)
        else:
            with (
                failures(verbose),
                defaults(ENVIRONMENT),
                quiet(verbose=verbose, descriptor=2) as console,
            ):
                console.print(f"starting an engine with {model}")
                settings = {"model": model, "dtype": dtype, **arguments}
                result = _of_engine(settings, patched_prompt, request, sae, console.file)
        if out:
            result.save(Path(out).expanduser())
        if html:
            result.picture().save(html)
    if as_json:
        print_json(result.to_json())
        return
    _show(result, best)
    for path in filter(None, (out, html)):
        typer.echo(f"written: {path}")


def read_source_option(text: str, of_features: bool = False) -> Any:
    """Read a source: JSON if it begins with [ or {, a number for features, otherwise a text."""
    if of_features:
        with suppress(ValueError):
            return float(text)
    return read_json_option("--source", text) if text.startswith(("[", "{")) else text


def read_metric_option(text: str) -> Any:
    """Read a metric: JSON, or `NAME:TOKEN…`, in which a token with a colon is a JSON string."""
    if text.startswith("{"):
        return read_json_option("--metric", text)
    if text.startswith("recovered:"):
        return {"recovered": read_metric_option(text.removeprefix("recovered:"))}
    name, *tokens = _PART.findall(text)[: text.count(":") + 1]
    tokens = [
        read_json_option("--metric", token) if token.startswith('"') else token
        for token in tokens
        if token
    ]
    if _METRICS.get(name) != len(tokens):
        raise typer.BadParameter(
            '--metric: expected logit-diff:" Paris":" Tokyo", logprob:" Paris", kl, or recovered: '
            f"before one of these; got {text}"
        )
    if name == "kl":
        return name
    return {name.replace("-", "_"): tokens if len(tokens) > 1 else tokens[0]}


def _as_chat(value: Any, chat: bool) -> Any:
    """Return a text as the messages of a chat, if it is one."""
    is_word = value == "zero" or isinstance(value, str) and value.startswith("mean:")
    if not chat or is_word or not isinstance(value, str):
        return value
    return [{"role": "user", "content": value}]


def _of_engine(
    settings: Mapping[str, Any], prompt: Any, request: SweepRequest, path: str, terminal: IO[str]
) -> Sweep:
    """Return the sweep of a new engine that taps its sites; uncompiled without a GPU."""
    import torch

    from midstream import LLM, SAE

    sae = SAE.load(path) if path else None
    room = {}
    if sae is not None:
        request = request.at_tap(sae.tap)
        # Of its encoder; see the setting `readout_bytes`.
        room = {"readout_bytes": 4 * sae.num_features * (sae.width + 2) + 256}
    taps = list(request.sites)
    if request.reads_all:
        taps.append("final_norm")

    tqdm: Any = import_module("tqdm").tqdm  # vLLM's own, which is quiet here

    def bar(*args: Any, **named: Any) -> Any:
        return tqdm(*args, **{**named, "file": terminal, "disable": False})

    eager = {} if torch.cuda.is_available() else {"enforce_eager": True}
    llm = LLM(**{**eager, "midstream": {"sites": taps, **room}, **settings})
    if sae is not None:
        llm.saes.register(_NAME, sae)
    return llm.sweep(prompt, **_arguments_of(request), use_tqdm=bar)


def _of_server(url: str, model: str, prompt: Any, request: SweepRequest, console: Console) -> Sweep:
    import httpx
    from rich.progress import Progress

    from midstream import Client

    arguments = _arguments_of(request) | ({"model": model} if model else {})
    try:
        with (
            Client(url, api_key=os.environ.get("VLLM_API_KEY")) as client,
            Progress(console=console, transient=True) as progress,
        ):
            task = progress.add_task("cells", total=None)

            def on_cell(*_: Any) -> None:
                progress.advance(task)

            return client.sweep(prompt, on_cell=on_cell, **arguments)
    except (httpx.HTTPError, httpx.InvalidURL, ConfigError) as error:
        raise OSError(f"--url {url}: {error}") from error


def _arguments_of(request: SweepRequest) -> dict[str, Any]:
    return {**request.to_dict(), "source": request.source, "metric": request.metric}


def _show(result: Sweep, best: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    typer.echo(repr(result))
    typer.echo(str(result.receipts))
    if not best:
        return
    table = Table()
    for name in (*result.dims, "token", "value"):
        table.add_column(name, justify="right" if name in ("layer", "feature", "value") else "left")
    for cell in result.best(best):
        token = json.dumps(cell["token"], ensure_ascii=False)
        labels = [str(cell[name]) for name in result.dims]
        table.add_row(*labels, token, f"{cell['value']:.4f}")
    console.print(table)
