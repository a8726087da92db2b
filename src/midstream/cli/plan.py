"""`midstream plan --model … --tokens …`: estimate the cost of a capture job."""

from __future__ import annotations

from typing import Annotated

import typer

from midstream.cli.capture import read_layers
from midstream.cli.output import print_json, refusals

GB = 1e9


def plan(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|DIR|FILE",
            help="llama-8b, llama-70b, llama-405b, qwen3-0.6b, qwen3-30b-a3b, smollm2-135m; a "
            "folder with a config.json; or such a file.",
        ),
    ],
    tokens: Annotated[int, typer.Option(help="Total number of computed tokens.")],
    layers: Annotated[str, typer.Option(help="Layers, such as 10,20 or -1; or all.")] = "all",
    sites: Annotated[str, typer.Option(help="Sites, such as resid_post,mlp_out.")] = "resid_post",
    codec: Annotated[
        list[str] | None,
        typer.Option(help="Estimate only this codec.", show_default="common codecs"),
    ] = None,
    returned: Annotated[
        str,
        typer.Option(
            "--return",
            metavar="gathered|sharded",
            help="Which ranks transfer rows: the first one, or each its share.",
            show_default="both",
        ),
    ] = "",
    request_tokens: Annotated[int, typer.Option(help="Tokens of one request.")] = 512,
    fraction: Annotated[
        float, typer.Option(help="Fraction of the tokens whose rows are captured.")
    ] = 1.0,
    tp: Annotated[int, typer.Option(help="GPUs that share each layer.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    dp: Annotated[
        int | None,
        typer.Option(help="Number of engines.", show_default="as many as fit on the machines"),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Number of machines.", show_default="as few as fit the engines"),
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs per machine.")] = 8,
    dtype: Annotated[str, typer.Option(help="Dtype of the engine.")] = "auto",
    step_tokens: Annotated[
        int, typer.Option(help="Tokens of a full step: max_num_batched_tokens.")
    ] = 8192,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(help="Rate of one engine without captures.", show_default="by its FLOP/s"),
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(help="TFLOP/s of one GPU.", show_default="measured: 8B, H200")
    ] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(help="Multi-GPU efficiency of one engine.", show_default="0.8"),
    ] = None,
    bus: Annotated[
        float | None, typer.Option(help="GB/s from one GPU to the host.", show_default="measured")
    ] = None,
    writer: Annotated[
        float | None,
        typer.Option(help="GB/s of one engine's store writer.", show_default="measured"),
    ] = None,
    network: Annotated[
        float | None, typer.Option(help="GB/s out of one machine.", show_default="25")
    ] = None,
    store: Annotated[
        float | None, typer.Option(help="GB/s into the store, in total.", show_default="100")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(help="Memory of one GPU in GB.", show_default="141")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Estimate the cost of a capture job: bytes, bandwidths, time, bottleneck, and the recommended
    codec and layout.

    Nothing is downloaded or run. Each rate is shown with its basis: measured, derived from
    measurements, assumed, or given. Exit status: 0 success; 2 the input was rejected.
    """
    with refusals(as_json):
        # Lazy: codecs and the store's layout import torch.
        from midstream.tools.capacity import Fleet, PlannedJob, advise, read_model
        from midstream.tools.capacity.advice import loads_of
        from midstream.tools.capacity.job import read_return
        from midstream.tools.capacity.rates import known_rates
        from midstream.tools.capacity.table import render, to_dict

        rates = known_rates().with_given(
            engine=tokens_per_second,
            gpu_flops=_scaled(tflops, 1e12),
            efficiency=efficiency,
            bus=_scaled(bus, GB),
            writer=_scaled(writer, GB),
            network=_scaled(network, GB),
            store=_scaled(store, GB),
            gpu_memory=_scaled(gpu_memory, GB),
        )
        job = PlannedJob.of(
            read_model(model, dtype),
            read_layers(layers),
            [name.strip() for name in sites.split(",")],
            tokens,
            Fleet.of(tp, pp, gpus_per_node, nodes, dp),
            request_tokens=request_tokens,
            fraction=fraction,
            step_tokens=step_tokens,
        )
        loads = loads_of(job, codec or (), read_return(returned, tp), rates)
        found = advise(job, loads, rates)
    if as_json:
        print_json(to_dict(job, loads, found, rates))
    else:
        typer.echo(render(job, loads, found, rates), nl=False)


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit
