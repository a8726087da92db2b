"""Captures as a step of a Ray Data pipeline (`midstream.lab.jobs.ray.capture_dataset`)."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from midstream.console import WHEN_QUIET
from midstream.errors import ReceiptWarning, SpecError
from midstream.lab.jobs.engine import Engine, Reply, start_vllm
from midstream.lab.jobs.job import Job
from midstream.lab.jobs.ray.cluster import import_ray
from midstream.lab.jobs.ray.engine_thread import EngineThread
from midstream.lab.jobs.ray.executor import ENGINES, ON_CPUS, actor_options
from midstream.lab.jobs.ray.placement import Placement
from midstream.lab.jobs.records import Failed, Record, read_value
from midstream.lab.jobs.request_ids import Identity
from midstream.lab.jobs.sources import STDIN
from midstream.plan import Capture
from midstream.sites import ENDS, Tap

if TYPE_CHECKING:
    from ray.data import Dataset

# Number of prompts per batch; their rows are returned together.
BATCH = 64
_NOWHERE = "nowhere"

ID = "id"
PROMPT_TOKEN_IDS = "prompt_token_ids"
GENERATED_TOKEN_IDS = "generated_token_ids"
POSITIONS = "positions"
TOKEN_IDS = "token_ids"
ERROR = "error"


def capture_dataset(
    ds: Dataset,
    model: str,
    capture: Capture,
    *,
    prompt_field: str = "",
    chat: bool = False,
    max_tokens: int = 1,
    revision: str = "",
    dtype: str = "auto",
    engine_args: Mapping[str, Any] | None = None,
    spread: Placement | None = None,
    batch_size: int = BATCH,
    start: Callable[[Job], Engine] = start_vllm,
) -> Dataset:
    """Capture activations for a column of prompts.

    Like all steps of Ray Data it runs lazily, block by block, in a pool of actors with one engine
    each. The order of the output is undefined, as always in Ray Data. A prompt that cannot be
    captured has its reason in `error` and no rows. An engine that breaks ends the pipeline, as any
    exception in a step does; Ray restarts an engine whose process is killed.

    Args:
        model: name of the model, or a folder that exists on all machines.
        capture: rows to capture. Sink, tag, request_id and metadata must not be set.
        prompt_field: column of the prompts; empty: `text`, or `messages` for conversations.
        max_tokens: number of tokens to generate per prompt, at temperature 0.
        revision, dtype, engine_args: see `midstream.lab.jobs.Job`.
        spread: number of engines and their resources; None: as many engines as fit the cluster. The
            address is ignored: a dataset belongs to the cluster that this process is connected to.
        batch_size: number of prompts per batch. Their rows are in memory at the same time.
        start: starts an engine, in a process of the cluster.

    Returns:
        The input's columns, and:

        - `id`: 16 hexadecimal digits, equal for equal prompts and settings.
        - `prompt_token_ids`, `generated_token_ids`: int64 [tokens].
        - `positions`, `token_ids`: int64 [rows], of each captured row.
        - for each tap a column such as `resid_post.10`: decoded rows, [rows, width] in the model's
          dtype; float32 for bfloat16, which NumPy lacks.
        - `error`: why there are no rows; empty if there are.
    """
    ray = import_ray()
    job = Job(
        model=model,
        data=STDIN,
        out=_NOWHERE,
        capture=capture,
        max_tokens=max_tokens,
        prompt_field=prompt_field,
        chat=chat,
        revision=revision,
        dtype=dtype,
        engine_args=engine_args or {},
    )
    if batch_size < 1:
        raise SpecError("batch_size", f"expected at least 1, got {batch_size}")
    spread = spread or Placement()
    if not ray.is_initialized():
        ray.init(include_dashboard=False)
    layout = spread.resolve(job, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    calls = layout.chunks_each(job, batch_size)
    environment = ENGINES | ({} if spread.log else WHEN_QUIET) | ({} if layout.gpus else ON_CPUS)
    return ds.map_batches(
        _Capturer,
        fn_constructor_args=(job, start, os.getcwd(), environment),
        batch_size=batch_size,
        **actor_options(ray, layout, calls),
    )


class _Capturer:
    """Actor with an engine, which adds columns to batches."""

    def __init__(
        self,
        job: Job,
        start: Callable[[Job], Engine],
        folder: str,
        environment: Mapping[str, str],
    ) -> None:
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        if os.path.isdir(folder):
            os.chdir(folder)  # relative paths of the model refer to it
        # Problems in receipts are in the column `error`.
        warnings.simplefilter("ignore", ReceiptWarning)
        self._job = job
        self._identity = Identity(job)
        self._engine = EngineThread(job, start)

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        prompts = self._read(batch)
        replies = await asyncio.wrap_future(
            self._engine.submit(
                [record if isinstance(record, Failed) else record.prompt for record in prompts]
            )
        )
        columns = self._columns(prompts, replies)
        for name in columns:
            if name in batch:
                raise SpecError("ds", f"the dataset already has a column {name!r}; rename it")
        yield {**batch, **columns}

    def _read(self, batch: dict[str, Any]) -> list[Record | Failed]:
        name = self._job.column
        if name not in batch:
            raise SpecError(
                "prompt_field", f"the dataset has no column {name!r}; it has {', '.join(batch)}"
            )
        form = name, self._job.chat, self._job.media_files
        return [read_value(0, plain(value), *form) for value in batch[name]]

    def _columns(
        self, prompts: Sequence[Record | Failed], replies: Sequence[Reply | Failed]
    ) -> dict[str, Any]:
        none = np.zeros(0, np.int64)
        columns: dict[str, list[Any]] = {
            ID: [
                "" if isinstance(record, Failed) else f"{self._identity.digest(record):016x}"
                for record in prompts
            ],
            ERROR: [answer.reason if isinstance(answer, Failed) else "" for answer in replies],
        }
        for reply in replies:
            rows: dict[str, Any] = dict.fromkeys(
                (PROMPT_TOKEN_IDS, GENERATED_TOKEN_IDS, POSITIONS, TOKEN_IDS), none
            )
            if isinstance(reply, Reply):
                rows[PROMPT_TOKEN_IDS] = np.array(reply.prompt_token_ids, np.int64)
                rows[GENERATED_TOKEN_IDS] = np.array(reply.generated_token_ids, np.int64)
                rows[POSITIONS] = reply.activations.positions.numpy()
                rows[TOKEN_IDS] = reply.activations.token_ids.numpy()
                taken = reply.activations.numpy()
                rows |= {f"{site}.{layer}": taken[site, layer] for site, layer in self._taps()}
            else:
                rows |= {f"{tap[0]}.{tap[1]}": self._no_rows(tap) for tap in self._taps()}
            for name, value in rows.items():
                columns.setdefault(name, []).append(value)
        return {name: ragged(values) for name, values in columns.items()}

    def _taps(self) -> list[Tap]:
        capture, layers = self._job.capture, self._engine.origin.num_layers
        which = capture.layers.indices
        indices = range(layers) if which == "all" else sorted({int(i) % layers for i in which})
        return [
            (site, layer)
            for site in capture.sites.names
            for layer in ([ENDS[site] % layers] if site in ENDS else indices)
        ]

    def _no_rows(self, tap: Tap) -> Any:
        origin = self._engine.origin
        dtype = "float32" if origin.dtype == "bfloat16" else origin.dtype
        return np.zeros((0, origin.width(tap)), dtype)


def plain(value: Any) -> Any:
    """Convert a cell of a NumPy column to JSON values. Ray Data represents lists as arrays."""
    if isinstance(value, np.ndarray):
        return [plain(cell) for cell in value]
    if isinstance(value, dict):
        return {name: plain(cell) for name, cell in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def ragged(values: Sequence[Any]) -> Any:
    """Return a column whose cells may differ in shape, as an object array [n]."""
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        column[index] = value
    return column
