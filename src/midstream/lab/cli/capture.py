"""`midstream capture MODEL --data …`: capture a dataset's activations into a store."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midstream.cli.command import Command, whole
from midstream.cli.output import (
    REFUSED,
    failures,
    print_json,
    read_json_option,
    read_names,
    read_positions,
    refusals,
)
from midstream.sites import ENDS

if TYPE_CHECKING:
    from midstream.lab.jobs import CaptureRun, Job


class CommandClass(Command):
    """The command, with `--ray` as an option whose value is optional."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_address(args))


_LOGGER = logging.getLogger(__name__)
# An address of Ray; anything else after `--ray` is a separate argument.
_ADDRESS = re.compile(r"auto|local|\w+://.*|\[?[\w.:-]+\]?:\d+")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_REPEAT_SECONDS = 5.0
# Defaults; variables that the user has set take precedence.
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}


def capture(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or name of the model; also --model.")
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE|NAME|-",
            help="JSON lines or an array, text, CSV, Parquet, a Hugging Face dataset by name or "
            "folder, or - for standard input.",
        ),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="The store: a directory, or s3://….")],
    layers: Annotated[
        str, typer.Option("--layers", "--layer", help="Layers, such as 10,20 or -1; or all.")
    ] = "all",
    sites: Annotated[
        str, typer.Option("--sites", "--site", help="Sites, such as resid_post,mlp_out.")
    ] = "resid_post",
    positions: Annotated[
        str,
        typer.Option(
            "--positions",
            "--position",
            help="Positions: last_prompt, prompt, generated, all, 0,-1, or JSON; with --pack, of "
            "each document.",
        ),
    ] = "last_prompt",
    max_tokens: Annotated[
        int,
        typer.Option(
            parser=whole(), metavar="N", help="Tokens to generate for each prompt, greedily."
        ),
    ] = 1,
    codec: Annotated[
        str,
        typer.Option(help="Codec: raw, cast:dtype=float16, full8, rp8:k=512,seed=0, topk8:k=64."),
    ] = "raw",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an incomplete job in DIR.")
    ] = False,
    tag: Annotated[str, typer.Option(help="Tag by which these rows can be selected.")] = "",
    prompt_field: Annotated[
        str,
        typer.Option(
            "--prompt-field",
            "--column",
            "--text-column",
            help="Field or column of the prompt.",
            show_default="text; messages",
        ),
    ] = "",
    format: Annotated[
        str,
        typer.Option(
            metavar="jsonl|text|csv|tsv|parquet",
            help="Format of a file or standard input.",
            show_default="by the file's name, else jsonl",
        ),
    ] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are conversations, or user messages.")
    ] = False,
    chat_template: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="With --chat: the template.", show_default="the tokenizer's own"
        ),
    ] = "",
    roles: Annotated[
        bool,
        typer.Option(
            "--roles", help="With --chat: store which tokens are of each role, for loss masks."
        ),
    ] = False,
    truncate: Annotated[
        int | None,
        typer.Option(parser=whole(), metavar="N", help="Cut each line to its first N tokens."),
    ] = None,
    pack: Annotated[
        int | None,
        typer.Option(
            parser=whole(2),
            metavar="LENGTH",
            help="Join lines to prompts of LENGTH tokens, with a separator between two.",
        ),
    ] = None,
    separator: Annotated[
        int | None,
        typer.Option(
            parser=whole(0),
            metavar="ID",
            help="With --pack: id of the token between two lines.",
            show_default="the end-of-text token",
        ),
    ] = None,
    exclude: Annotated[
        str,
        typer.Option(
            metavar="first",
            help="Leave out the first token of each prompt, and of each packed line.",
        ),
    ] = "",
    subset: Annotated[str, typer.Option(help="Subset of a Hugging Face dataset.")] = "",
    split: Annotated[str, typer.Option(help="Split of a Hugging Face dataset.")] = "train",
    limit: Annotated[
        int | None,
        typer.Option(
            parser=whole(), metavar="N", help="Maximum number of lines to read, such as 1e5."
        ),
    ] = None,
    keep_prompts: Annotated[
        bool, typer.Option("--keep-prompts", help="Store the texts with the rows.")
    ] = False,
    record: Annotated[
        bool,
        typer.Option("--record", help="Store each request as well, for midstream replay."),
    ] = False,
    revision: Annotated[str, typer.Option(help="Revision of the model.")] = "",
    dtype: Annotated[str, typer.Option(help="Dtype of the engine.")] = "auto",
    engine_args: Annotated[
        str, typer.Option(metavar="JSON", help="Further arguments of vllm.LLM.")
    ] = "{}",
    errors: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="File that lists the lines that could not be captured.",
            show_default="DIR/errors.jsonl",
        ),
    ] = "",
    flush_seconds: Annotated[
        float,
        typer.Option(help="Maximum seconds until rows are on disk: the work that a kill loses."),
    ] = 30.0,
    ray: Annotated[
        str,
        typer.Option(
            metavar="[ADDRESS]",
            help="Run on the Ray cluster at host:port. Without an address: the cluster of "
            "RAY_ADDRESS or of this machine. If there is none, or with local: a new cluster on "
            "this machine.",
        ),
    ] = "",
    ray_engines: Annotated[
        int | None,
        typer.Option(
            parser=whole(), metavar="N", help="Number of engines.", show_default="as many as fit"
        ),
    ] = None,
    ray_cpus: Annotated[
        float, typer.Option(min=0, help="CPU cores per engine; on a CPU, its threads.")
    ] = 1,
    ray_gpus: Annotated[
        float | None,
        typer.Option(min=0, help="GPUs per engine.", show_default="one per rank"),
    ] = None,
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Only print how many rows and bytes it will write."),
    ] = False,
    write_rate: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S", help="With --estimate: rate of the store, for the least time."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only a summary as JSON.")] = False,
    verbose: Annotated[
        bool, typer.Option(help="Show vLLM's log and the tracebacks of errors.")
    ] = False,
) -> None:
    """Capture a dataset's activations into a store.

    Exit status: 0 all lines are stored; 1 some lines failed, which are listed in DIR/errors.jsonl,
    or the job failed; 2 the job was rejected and did not start; 130 or 143 it was stopped by a
    signal. Stored rows are kept; --resume continues from there. With --estimate it is 1 if some
    lines would fail, or if the directory has too little space.

    Example: midstream capture org/model --data prompts.jsonl --out acts --layers 10,20
    """
    from midstream.console import WHEN_QUIET, defaults

    if not ray and (ray_engines, ray_cpus, ray_gpus) != (None, 1, None):
        raise typer.BadParameter("--ray-engines, --ray-cpus and --ray-gpus require --ray")
    if write_rate is not None and not (estimate and 0 < write_rate < math.inf):
        raise typer.BadParameter("--write-rate requires --estimate, and a number above 0")
    arguments = read_json_option("--engine-args", engine_args)
    if not isinstance(arguments, dict):
        raise typer.BadParameter(f"--engine-args: expected a JSON object, got {engine_args}")
    if chat_template:
        if not chat or "chat_template" in arguments:
            raise typer.BadParameter("--chat-template requires --chat, and is given once")
        arguments["chat_template"] = _read_template(chat_template)
    environment = {**ENVIRONMENT, **({} if verbose else WHEN_QUIET)}
    with defaults(environment), refusals(as_json):
        from midstream.lab.jobs import CaptureRun, Job
        from midstream.plan import Capture

        job = Job(
            model=model,
            data=data,
            out=out,
            capture=Capture(
                _layers_of(layers, sites),
                read_names(sites),
                read_positions(positions),
                codec=codec,
            ),
            max_tokens=max_tokens,
            tag=tag,
            prompt_field=prompt_field,
            chat=chat,
            format=format,
            roles=roles,
            truncate=truncate,
            pack=pack,
            separator=separator,
            exclude=exclude,
            subset=subset,
            split=split,
            limit=limit,
            keep_prompts=keep_prompts,
            record=record,
            revision=revision,
            dtype=dtype,
            engine_args=arguments,
            resume=resume,
            errors=errors,
            flush_seconds=flush_seconds,
        )
        if estimate:
            raise typer.Exit(_estimate(job, write_rate, as_json, verbose))
        if ray:
            from midstream.lab.jobs.ray import Placement, RayCaptureRun

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


def _estimate(job: Job, write_rate: float | None, as_json: bool, verbose: bool) -> int:
    """Print what a job will write, and return the exit status; `write_rate` is in GB/s."""
    from midstream.lab.jobs.estimate import SAMPLE, estimate_job
    from midstream.lab.jobs.progress import duration

    with failures(verbose):
        guess = estimate_job(job)
    seconds = None if write_rate is None else guess.stored_bytes / (write_rate * 1e9)
    is_too_large = guess.free_bytes is not None and guess.stored_bytes > guess.free_bytes
    status = int(is_too_large or guess.failed > 0)
    if as_json:
        print_json({**asdict(guess), "seconds": seconds, "status": status})
        return status
    by = f", by the first {SAMPLE:,}" if guess.lines > SAMPLE else ""
    space = "" if guess.free_bytes is None else f", {_size(guess.free_bytes)} are free"
    lines = [
        f"{guess.lines - guess.failed:,} of {guess.lines:,} lines{by}: at most {guess.rows:,} rows",
        *([f"packed into {guess.prompts:,} prompts"] if job.pack is not None else []),
        f"{guess.token_bytes:,} bytes per token, {_size(guess.nbytes)} in all",
        f"{job.out}: about {_size(guess.stored_bytes)}{space}",
    ]
    if seconds is not None:
        lines.append(f"at {write_rate:g} GB/s writing takes at least {duration(seconds)}")
    if guess.failed:
        lines.append(f"{guess.failed:,} will fail, the first one for: {guess.problem}")
    typer.echo("\n".join(lines))
    return status


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB" if nbytes < 1e10 else f"{nbytes / 1e9:,.1f} GB"


def _work(capturing: CaptureRun, as_json: bool, verbose: bool) -> int:
    """Run the capture, print its result, and return the exit status."""
    from midstream.console import quiet
    from midstream.errors import MidstreamError
    from midstream.lab.jobs.directory_lock import errors_file
    from midstream.lab.jobs.engine import start_vllm
    from midstream.lab.jobs.progress import Display, conclude

    job, stop = capturing.job, threading.Event()
    problem = ""
    with _signals(capturing, stop) as signals:
        try:
            with (
                quiet(verbose=verbose, descriptor=2) as console,
                Display(console, errors_file(job)) as display,
            ):
                if capturing.check is not None and capturing.check.failed:
                    display.say(str(capturing.check))
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
    """Yield a list of stop signals: the first ends a job cleanly, a second interrupts it."""
    received: list[int] = []
    before: dict[int, Any] = {}

    def record(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if stop.is_set() or not capturing.has_begun:
            stop.set()
            # Repeat the interrupt: an exception raised inside a callback is lost.
            before.setdefault(signal.SIGALRM, signal.signal(signal.SIGALRM, interrupt))
            signal.setitimer(signal.ITIMER_REAL, _REPEAT_SECONDS, _REPEAT_SECONDS)
            interrupt(number, frame)
        stop.set()

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        for number in _SIGNALS:
            before[number] = signal.signal(number, record)
        yield received
    finally:
        if signal.SIGALRM in before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for which, handler in before.items():
            signal.signal(which, handler)


def check_writable(path: str, option: str = "") -> None:
    """Raise BadParameter if a file cannot be written, before the work starts."""
    target = Path(path).expanduser()
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        raise typer.BadParameter(f"{option}{path}: the file cannot be written; use another path")


def _read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--chat-template {path}: cannot be read: {error}") from None


def read_layers(text: str) -> Any:
    """Parse layers: `all`, `10`, or `10,20`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        return text


def _layers_of(text: str, sites: str) -> Any:
    """Return the layers of a capture; None for "all" at sites that have no layers."""
    in_layers = any(name.strip() not in ENDS for name in sites.split(","))
    return read_layers(text) if in_layers or text != "all" else None


def with_address(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, before `--`, with `auto` after each `--ray` that no address follows."""
    words: list[str] = []
    left = list(arguments)
    while left and left[0] != "--":
        words.append(left.pop(0))
        if words[-1] == "--ray" and not (left and _ADDRESS.fullmatch(left[0])):
            words.append("auto")
    return words + left
