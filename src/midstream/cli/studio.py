"""`midstream studio MODEL`: a server with Studio, the page for browsers, which it opens."""

from __future__ import annotations

import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
import webbrowser
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midstream.cli.output import read_json_option
from midstream.cli.serve import CONTEXT, named_file, server_command

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CONTEXT", "studio"]

_LOOK_SECONDS = 0.5


def studio(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder or name, as for vllm serve; also --model."),
    ],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Beyond this machine, also give --api-key.")
    ] = "127.0.0.1",
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page when it is ready.")
    ] = True,
    vectors: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="Register the vectors of a file; repeatable."),
    ] = None,
    settings: Annotated[
        str | None, typer.Option(help="Other settings of midstream, as a JSON object.")
    ] = None,
) -> None:
    """Serve a model with midstream and Studio, and open Studio in the browser.

    Studio is a page to chat with coloured tokens, steer with sliders, fit and register vectors, and
    look into layers. All other options are passed to `vllm serve`: --dtype, --max-model-len, …
    Ctrl-C ends the server.

    Example: midstream studio org/model --dtype bfloat16
    """
    options: Any = read_json_option("--settings", settings) if settings is not None else {}
    if not isinstance(options, dict):
        raise typer.BadParameter(f"--settings: expected a JSON object, got {settings}")
    http = options.get("http", {})
    if http is True or http is None:
        http = {}
    if not isinstance(http, dict):
        raise typer.BadParameter(f"--settings: Studio needs http, got {http!r}")
    options["http"] = {**http, "studio": True}
    if vectors:
        options["vectors"] = dict(named_file(word) for word in vectors)
    words = [*context.args, "--host", host, "--port", str(port)]
    command = server_command(model, options, words)
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    shown = f"[{shown}]" if ":" in shown else shown
    has_tls = any(word.startswith("--ssl-keyfile") for word in words)
    url = f"http{'s' if has_tls else ''}://{shown}:{port}/midstream/"
    typer.echo(f"Studio will be at {url} once the model is loaded.")
    server = subprocess.Popen(command)
    with _passing_signals(server):
        if _is_ready(server, url):
            typer.echo(f"Studio: {url}")
            if browser and not webbrowser.open(url):
                typer.echo("No browser was found; open this address in one.")
        status = server.wait()
    raise typer.Exit(status if status >= 0 else 128 - status)


@contextmanager
def _passing_signals(server: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave Ctrl-C to the server, which the terminal sends it too, and pass SIGTERM on to it."""

    def stop(number: int, frame: FrameType | None) -> None:
        server.send_signal(number)

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, stop),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_ready(server: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until the page is there; False: the server ended before."""
    # The certificate may be of another name than this machine's; nothing is read of the answer.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    while server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5, context=context):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(_LOOK_SECONDS)
    return False
