"""`midstream replay FILE_OR_STORE`: run recorded requests again, and compare every bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from midstream.cli.command import whole
from midstream.cli.output import print_json, read_json_option, refusals
from midstream.lab.cli.capture import ENVIRONMENT, check_writable


def replay(
    records: Annotated[
        str,
        typer.Argument(
            metavar="FILE_OR_STORE",
            help="A file of Recorder, or a store of midstream capture --record.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(help="Folder or name of the model.", show_default="as recorded"),
    ] = "",
    mix: Annotated[
        int, typer.Option(parser=whole(), metavar="N", help="Requests sent at a time.")
    ] = 64,
    seed: Annotated[int, typer.Option(help="Of the order of the requests.")] = 0,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Also on an engine that differs from the recorded one.")
    ] = False,
    report: Annotated[
        str, typer.Option(metavar="FILE", help="Write all differences as JSON.")
    ] = "",
    engine_args: Annotated[
        str, typer.Option(metavar="JSON", help="Arguments of vllm.LLM, in place of the recorded.")
    ] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    verbose: Annotated[
        bool, typer.Option(help="Show vLLM's log and the tracebacks of errors.")
    ] = False,
) -> None:
    """Run recorded requests again, in another order and mix, and compare every bit.

    Exit status: 0 all bits are the same; 1 some differ; 2 rejected: a record is malformed, or
    versions, model, dtype, quantisation, hardware or settings are not those that were recorded.

    Example: midstream replay requests.jsonl --mix 16 --report differences.json
    """
    from midstream.cli.output import failures
    from midstream.console import WHEN_QUIET, defaults, quiet

    arguments = read_json_option("--engine-args", engine_args)
    if not isinstance(arguments, dict):
        raise typer.BadParameter(f"--engine-args: expected a JSON object, got {engine_args}")
    if report:
        check_writable(report, "--report ")
    environment = {**ENVIRONMENT, **({} if verbose else WHEN_QUIET)}
    with defaults(environment), refusals(as_json), failures(verbose):
        from midstream.lab.replay import record, run
        from midstream.lab.replay.engine_identity import arguments_of

        read = record.read_records(records)
        first = read[0]
        if first.engine.get("batch_invariant"):
            environment = {"VLLM_BATCH_INVARIANT": "1"}
        if any(request.adapter for request in read):
            arguments.setdefault("enable_lora", True)
        settings = {**arguments_of(first.engine, first.settings), **arguments}
        with defaults(environment), quiet(verbose=verbose, descriptor=2):
            from midstream import LLM

            llm = LLM(model or str(first.engine["model"]), **settings)
            result = run.replay(llm, read, mix=mix, seed=seed, anyway=anyway)
    if report:
        text = json.dumps(result.to_dict(), indent=2) + "\n"
        Path(report).expanduser().write_text(text, encoding="utf-8")
    if as_json:
        print_json(result.to_dict())
    else:
        for difference in result.differences[:20]:
            typer.echo(str(difference))
        if len(result.differences) > 20:
            typer.echo(f"… {len(result.differences) - 20} more; --report FILE has all")
        typer.echo(str(result))
    raise typer.Exit(1 if result.differences else 0)
