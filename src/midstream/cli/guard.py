"""`midstream guard …`: the guards of a running server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midstream.cli.command import Command, CommandGroup
from midstream.cli.output import print_json, read_json_option, refusals
from midstream.errors import SpecError

if TYPE_CHECKING:
    from midstream.client import Client

Url = Annotated[str, typer.Option(help="URL of the server.")]
ApiKey = Annotated[str | None, typer.Option(envvar="VLLM_API_KEY", help="API key of the server.")]
AdminKey = Annotated[
    str | None,
    typer.Option(envvar="MIDSTREAM_ADMIN_KEY", help="Key for changes that affect all clients."),
]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the guard.")]
_URL = "http://127.0.0.1:8000"
_FILES = (".safetensors", ".json")
Show = Callable[[Any], str]


def put(
    name: Name,
    probe: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROBE]",
            help="A probe's file or folder, or the name of vectors that the server has.",
        ),
    ] = None,
    above: Annotated[float | None, typer.Option(help="It acts above this score.")] = None,
    below: Annotated[float | None, typer.Option(help="It acts below this score.")] = None,
    tokens: Annotated[
        int | None, typer.Option("--for", min=1, help="How many tokens in a row.")
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help='How scores are pooled: "max", "mean:8", "ema:0.9".')
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="Of a probe with classes, the one whose scores count.")
    ] = None,
    action: Annotated[str, typer.Option(help="shadow, flag, stop, switch or webhook.")] = "shadow",
    message: Annotated[
        str | None, typer.Option(help="What an answer that it stops ends with.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Only this model or adapter; repeatable.")
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FINGERPRINT",
            help="Only this API key, by the first 16 hex digits of its SHA-256; repeatable.",
        ),
    ] = None,
    share: Annotated[
        float | None, typer.Option(help="Only this share of the requests, 0 to 1.")
    ] = None,
    webhook: Annotated[str | None, typer.Option(help="URL that gets its events.")] = None,
    edits: Annotated[str | None, typer.Option(help="The edits of switch, as JSON.")] = None,
    when: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='Its first stage: {"guard": "cheap", "above": 1.0}.'),
    ] = None,
    if_unavailable: Annotated[
        str | None,
        typer.Option(
            metavar="act|pass",
            help="With --when: whether an answer that its second stage cannot judge is acted on.",
        ),
    ] = None,
    visible: Annotated[
        bool, typer.Option("--visible", help="Clients that ask see that it acted.")
    ] = False,
    text: Annotated[bool, typer.Option("--text", help="Its events have generated text.")] = False,
    training: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='Scores of the training: {"edges": […], "counts": […]}.'),
    ] = None,
    url: Url = _URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Define a guard, as a new version. It holds for all requests that come afterwards.

    A request that is under way keeps the version that it began with.

    Example: midstream guard put toxic probe.safetensors --above 2.0
    """
    scope = {"models": model, "keys": key, "share": share}
    fields: dict[str, Any] = {
        "above": above, "below": below, "for_": tokens, "pool": pool, "output": output,
        "action": action, "message": message, "webhook": webhook, "if_unavailable": if_unavailable,
        "visible": visible or None, "text": text or None,
        "scope": {name: value for name, value in scope.items() if value} or None,
        "edits": None if edits is None else read_json_option("--edits", edits),
        "when": None if when is None else read_json_option("--when", when),
        "training": None if training is None else read_json_option("--training", training),
    }  # fmt: skip

    def change(client: Client) -> Any:
        return client.guards.put(name, _read_probe(probe), **fields)

    _run(change, _line, (url, api_key, admin_key), as_json)


def get(
    name: Name,
    full: Annotated[bool, typer.Option("--full", help="Print vectors too.")] = False,
    url: Url = _URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
) -> None:
    """Print a guard as JSON.

    Example: midstream guard get toxic
    """
    _run(lambda client: client.guards.show(name, full), _line, (url, api_key, admin_key), True)


def list_(
    url: Url = _URL, api_key: ApiKey = None, admin_key: AdminKey = None, as_json: Json = False
) -> None:
    """List the guards that are active.

    Example: midstream guard list --url http://127.0.0.1:8000
    """
    _run(lambda client: client.guards.list(), _lines, (url, api_key, admin_key), as_json)


def promote(
    name: Name,
    url: Url = _URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Take the next action of shadow, flag, stop.

    Example: midstream guard promote toxic
    """
    keys = url, api_key, admin_key
    _run(lambda client: client.guards.promote(name), _line, keys, as_json)


def rollback(
    name: Name,
    version: Annotated[
        int | None, typer.Option("--to", min=1, help="Version; by default the one before.")
    ] = None,
    url: Url = _URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Make a new version that equals an old one, also of a deleted guard.

    Example: midstream guard rollback toxic --to 3
    """
    keys = url, api_key, admin_key
    _run(lambda client: client.guards.rollback(name, version), _line, keys, as_json)


def history(
    name: Name,
    url: Url = _URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """List the last versions of a guard: what changed, when, and who did it.

    Example: midstream guard history toxic
    """
    keys = url, api_key, admin_key
    _run(lambda client: client.guards.history(name), _lines, keys, as_json)


def delete(name: Name, url: Url = _URL, api_key: ApiKey = None, admin_key: AdminKey = None) -> None:
    """Delete a guard; its history stays, and `rollback` brings it back.

    Example: midstream guard delete toxic
    """
    keys = url, api_key, admin_key
    _run(lambda client: client.guards.remove(name), lambda _: f"{name} is deleted", keys, False)


COMMANDS: dict[str, Callable[..., None]] = {
    "put": put, "get": get, "list": list_, "promote": promote, "rollback": rollback,
    "history": history, "delete": delete,
}  # fmt: skip


def group() -> typer.Typer:
    """Return the group of these commands."""
    made = typer.Typer(
        cls=CommandGroup, no_args_is_help=True, help="Guards of a running server, by name."
    )
    for name, run in COMMANDS.items():
        made.command(name, cls=Command)(run)
    return made


def _run(
    work: Callable[[Client], Any],
    show: Show,
    server: tuple[str, str | None, str | None],
    as_json: bool,
) -> None:
    url, api_key, admin_key = server
    with refusals(as_json):
        # Lazy: httpx and NumPy.
        from httpx import HTTPError

        from midstream.client import Client
        from midstream.errors import EngineError

        try:
            with Client(url, api_key=api_key, admin_key=admin_key) as client:
                answer = work(client)
        except HTTPError as error:
            raise EngineError(str(error)) from None
    if as_json:
        print_json(answer)
    else:
        typer.echo(show(answer))


def _read_probe(value: str | None) -> Any:
    """Return the probe of a file or folder, or the name of vectors, unchanged."""
    if value is None or not os.path.exists(value):
        if value is not None and value.lower().endswith(_FILES):
            raise SpecError("probe", f"there is no file {value!r}")
        return value
    from midstream.plan.probe import Probe
    from midstream.validation import at, check_regular, check_suffix, read_json_text

    path = Path(value)
    if path.is_dir():
        return Probe.from_folder(path)
    with at(value):
        name = check_suffix(path, *_FILES)
    if not name.lower().endswith(".json"):
        return Probe.load(path)
    with at(value):
        check_regular(path)
        return Probe.parse(read_json_text(path.read_text("utf-8")))


def _line(version: Any) -> str:
    about = " ".join(f"{name} {version[name]:g}" for name in ("above", "below") if name in version)
    head = f"{version['name']} version" if "name" in version else "version"
    end = f" by {version['who']} at {version['time']}"
    if "action" not in version:
        return f"{head} {version['version']}: {version['change']}{end}"
    return f"{head} {version['version']}: {version['action']} {about}, {version['change']}{end}"


def _lines(versions: Any) -> str:
    return "\n".join(map(_line, versions)) or "no guards"
