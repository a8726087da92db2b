"""`midstream capture MODEL --data …`: a data set's activations, into a store."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from midstream.cli.output import REFUSED, print_json, read_json_option, read_positions, refusals

if TYPE_CHECKING:
    from midstream.jobs import CaptureRun


class CommandClass(TyperCommand):
    """The command, with `--ray` as an option that may go without its value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_address(args))


_LOGGER = logging.getLogger(__name__)
# What is an address of Ray's: all else after `--ray` is an argument of its own.
_ADDRESS = re.compile(r"auto|local|\w+://.*|\[?[\w.:-]+\]?:\d+")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AGAIN = 5.0  # seconds
# Defaults that a user's own settings override.
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}


def capture(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Its folder or name.")],
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE|NAME|-",
            help="JSON lines, a Parquet file, a Hugging Face data set, or - for JSON lines on the "
            "standard input.",
        ),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="The store: a directory, or s3://….")],
    layers: Annotated[str, typer.Option(help="As 10,20 or -1; or all.")] = "all",
    sites: Annotated[str, typer.Option(help="As resid_post,mlp_out.")] = "resid_post",
    positions: Annotated[
        str, typer.Option(help="As last_prompt, prompt, generated, all, 0,-1, or JSON.")
    ] = "last_prompt",
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that are generated for each prompt, greedily.")
    ] = 1,
    codec: Annotated[str, typer.Option(help="raw, full8, rp8:k=512,seed=0, topk8:k=64.")] = "raw",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what DIR has a part of.")
    ] = False,
    tag: Annotated[str, typer.Option(help="A word by which these rows can be selected.")] = "",
    prompt_field: Annotated[
        str, typer.Option(help="Field or column of the prompt.", show_default="text; messages")
    ] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are conversations, or what a user says.")
    ] = False,
    subset: Annotated[str, typer.Option(help="Of a data set that has several.")] = "",
    split: Annotated[str, typer.Option(help="Of a data set.")] = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="Read so many lines.")] = None,
    keep_prompts: Annotated[
        bool, typer.Option("--keep-prompts", help="Keep the texts with the rows.")
    ] = False,
    revision: Annotated[str, typer.Option(help="Of the model.")] = "",
    dtype: Annotated[str, typer.Option(help="The engine's.")] = "auto",
    engine_args: Annotated[
        str, typer.Option(metavar="JSON", help="Whatever else vllm.LLM takes.")
    ] = "{}",
    errors: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Where lines are listed that could not be captured.",
            show_default="DIR/errors.jsonl",
        ),
    ] = "",
    flush_seconds: Annotated[
        float, typer.Option(help="What came is on disk after so long: what a kill costs.")
    ] = 30.0,
    ray: Annotated[
        str,
        typer.Option(
            metavar="[ADDRESS]",
            help="Spread over a Ray cluster: the one at host:port; without an address that of "
            "RAY_ADDRESS or of this machine, or with none there, as with local, a new one of this "
            "machine's.",
        ),
    ] = "",
    ray_engines: Annotated[
        int | None, typer.Option(min=1, help="Engines.", show_default="as many as there is room")
    ] = None,
    ray_cpus: Annotated[
        float, typer.Option(min=0, help="CPU cores for each engine; on a CPU, its threads.")
    ] = 1,
    ray_gpus: Annotated[
        float | None,
        typer.Option(min=0, help="GPUs for each engine.", show_default="one for each rank"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a summary as JSON, and nothing else.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option(help="Show what vLLM logs, and where in it an error was raised.")
    ] = False,
) -> None:
    """Capture a data set's activations into a store.

    Exit status: 0 all lines are in the store; 1 some are not, which are listed in
    DIR/errors.jsonl, or the job broke off; 2 it was refused and did not begin; 130 or 143 it was
    stopped. What is in the store stays, and --resume goes on from there.
    """
    from midstream.console import WHEN_QUIET, defaults

    if not ray and (ray_engines, ray_cpus, ray_gpus) != (None, 1, None):
        raise typer.BadParameter("--ray-engines, --ray-cpus and --ray-gpus go with --ray")
    arguments = read_json_option("--engine-args", engine_args)
    if not isinstance(arguments, dict):
        raise typer.BadParameter(f"--engine-args: expected a JSON object, got {engine_args}")
    environment = {**ENVIRONMENT, **({} if verbose else WHEN_QUIET)}
    with defaults(environment), refusals(as_json):
        from midstream.jobs import CaptureRun, Job
        from midstream.spec import Capture

        job = Job(
            model=model,
            data=data,
            out=out,
            capture=Capture(
                read_layers(layers),
                [name.strip() for name in sites.split(",")],
                read_positions(positions),
                codec=codec,
            ),
            max_tokens=max_tokens,
            tag=tag,
            prompt_field=prompt_field,
            chat=chat,
            subset=subset,
            split=split,
            limit=limit,
            keep_prompts=keep_prompts,
            revision=revision,
            dtype=dtype,
            engine_args=arguments,
            resume=resume,
            errors=errors,
            flush_seconds=flush_seconds,
        )
        if ray:
            from midstream.jobs.ray import Placement, RayCaptureRun

            capturing: CaptureRun = RayCaptureRun(
                job,
                Placement(
                    address=ray, engines=ray_engines, cpus=ray_cpus, gpus=ray_gpus, log=verbose
                ),
            )
        else:
            capturing = CaptureRun(job)
        with capturing:
            status = _work(capturing, as_json, verbose)
    raise typer.Exit(status)


def _work(capturing: CaptureRun, as_json: bool, verbose: bool) -> int:
    """Captures, and tells what came of it; the exit status."""
    from midstream.console import quiet
    from midstream.errors import MidstreamError
    from midstream.jobs.directory_lock import errors_file
    from midstream.jobs.engine import start_vllm
    from midstream.jobs.progress import Display, conclude

    job, stop = capturing.job, threading.Event()
    problem = ""
    with _signals(capturing, stop) as signals:
        try:
            with (
                quiet(verbose=verbose, descriptor=2) as console,
                Display(console, errors_file(job)) as display,
            ):
                display.say(f"starting {capturing.engines} with {job.model}")
                capturing.work(start_vllm, display, stop)
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
            problem = "stopped"
        except MidstreamError as error:
            problem = str(error)
        except Exception as error:
            if verbose:
                _LOGGER.exception("the engine failed")
            problem = f"{type(error).__name__}: {error}"
    summary = capturing.summary
    status = summary.status if capturing.has_begun else REFUSED
    if signals:
        status = 128 + signals[0]
    if problem:
        typer.echo(f"error: {problem}", err=True)
    if as_json:
        print_json({**summary.to_dict(), "status": status, "error": problem or None})
    elif capturing.has_begun:
        typer.echo(conclude(summary))
    return status


@contextmanager
def _signals(capturing: CaptureRun, stop: threading.Event) -> Iterator[list[int]]:
    """While this is open, the first signal to stop is noted, and a job that has begun ends in
    good order; another one interrupts whatever goes on.
    """
    found: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        found.append(number)
        if stop.is_set() or not capturing.has_begun:
            stop.set()
            # Again after a while: an exception that is raised in a callback is lost.
            before.setdefault(signal.SIGALRM, signal.signal(signal.SIGALRM, interrupt))
            signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)
            interrupt(number, frame)
        stop.set()

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        for number in _SIGNALS:
            before[number] = signal.signal(number, note)
        yield found
    finally:
        if signal.SIGALRM in before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for which, handler in before.items():
            signal.signal(which, handler)


def read_layers(text: str) -> Any:
    """Layers as one writes them in a command: `all`, `10`, `10,20`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        return text


def with_address(arguments: Sequence[str]) -> list[str]:
    """Arguments of the command in which each `--ray` has its value: `auto`, where no address
    follows. What comes after `--` are no options.
    """
    found: list[str] = []
    left = list(arguments)
    while left and left[0] != "--":
        found.append(left.pop(0))
        if found[-1] == "--ray" and not (left and _ADDRESS.fullmatch(left[0])):
            found.append("auto")
    return found + left
