"""`midstream.jobs.ray.capture_dataset`: captures as a step of a Ray Data pipeline."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from midstream.console import WHEN_QUIET
from midstream.errors import ReceiptWarning, SpecError
from midstream.jobs.engine import Engine, Reply, start_vllm
from midstream.jobs.job import Job
from midstream.jobs.ray.cluster import import_ray
from midstream.jobs.ray.engine_thread import EngineThread
from midstream.jobs.ray.executor import ENGINES, ON_CPUS, actor_options
from midstream.jobs.ray.placement import Placement
from midstream.jobs.records import Failed, Record, read_value
from midstream.jobs.request_ids import Identity
from midstream.jobs.sources import STDIN
from midstream.spec import Capture

if TYPE_CHECKING:
    from ray.data import Dataset

# Prompts that go to an engine together, and come back together with their rows.
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
    """Captures a column of prompts. Like all steps of Ray Data it is done when results are asked
    for, block by block, in a pool of actors with an engine each.

    Rows come back in the order of nothing in particular, as Ray Data has it. A prompt that cannot
    be captured has the reason in `error` and no rows; an engine that breaks ends the pipeline, as
    any exception in a step does, and one whose process is killed is started again by Ray.

    Args:
        ds: has a column of prompts.
        model: its name, or a folder that all machines have.
        capture: which rows. Sink, tag, request_id and metadata are not set.
        prompt_field: the column of the prompts; empty: `text`, of conversations `messages`.
        chat: whether prompts are conversations, lists of messages.
        max_tokens: how many tokens each prompt is answered with, at temperature 0.
        revision, dtype, engine_args: as of `midstream.jobs.Job`.
        spread: how many engines, and what each takes. The address is not looked at: a data set is
            of the cluster that this process is connected to. None: as many engines as there is
            room for.
        batch_size: prompts that go to an engine together. Their rows are in memory at once.
        start: makes an engine, in a process of the cluster.

    Returns:
        The input's columns, and:

        - `id`: 16 hexadecimal digits, the same for the same prompt on the same terms.
        - `prompt_token_ids`, `generated_token_ids`: int64 [tokens].
        - `positions`, `token_ids`: int64 [rows], of each captured row.
        - for each tap a column like `resid_post.10`: [rows, hidden] in the model's dtype, decoded;
          float32 where that is bfloat16, which NumPy lacks.
        - `error`: why there are no rows; empty: they are there.

    Raises:
        SpecError: an argument is malformed, the input has a column of such a name, or the cluster
            has no room for an engine.
        UnsupportedError: Ray is not installed.
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
    layout = spread.settle(job, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    calls = layout.chunks_each(job, batch_size)
    environment = ENGINES | ({} if spread.log else WHEN_QUIET) | ({} if layout.gpus else ON_CPUS)
    return ds.map_batches(
        _Capturer,
        fn_constructor_args=(job, start, os.getcwd(), environment),
        batch_size=batch_size,
        **actor_options(ray, layout, calls),
    )


class _Capturer:
    """An actor with an engine, which puts columns beside those that come."""

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
            os.chdir(folder)  # where a model's relative path begins
        # What receipts say is in the column `error`.
        warnings.simplefilter("ignore", ReceiptWarning)
        self._job = job
        self._identity = Identity(job)
        self._collector = EngineThread(job, start)

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        prompts = self._read(batch)
        replies = await asyncio.wrap_future(
            self._collector.submit(
                [each if isinstance(each, Failed) else each.prompt for each in prompts]
            )
        )
        columns = self._columns(prompts, replies)
        for name in columns:
            if name in batch:
                raise SpecError("ds", f"there is a column {name!r} already; rename it")
        yield {**batch, **columns}

    def _read(self, batch: dict[str, Any]) -> list[Record | Failed]:
        name = self._job.column
        if name not in batch:
            raise SpecError(
                "prompt_field", f"there is no column {name!r}; there are {', '.join(batch)}"
            )
        return [read_value(0, plain(value), name, self._job.chat) for value in batch[name]]

    def _columns(
        self, prompts: Sequence[Record | Failed], replies: Sequence[Reply | Failed]
    ) -> dict[str, Any]:
        none = np.zeros(0, np.int64)
        found: dict[str, list[Any]] = {
            ID: [
                "" if isinstance(each, Failed) else f"{self._identity.digest(each):016x}"
                for each in prompts
            ],
            ERROR: [each.reason if isinstance(each, Failed) else "" for each in replies],
        }
        for each in replies:
            rows: dict[str, Any] = dict.fromkeys(
                (PROMPT_TOKEN_IDS, GENERATED_TOKEN_IDS, POSITIONS, TOKEN_IDS), none
            )
            if isinstance(each, Reply):
                rows[PROMPT_TOKEN_IDS] = np.array(each.prompt_token_ids, np.int64)
                rows[GENERATED_TOKEN_IDS] = np.array(each.generated_token_ids, np.int64)
                rows[POSITIONS] = each.activations.positions.numpy()
                rows[TOKEN_IDS] = each.activations.token_ids.numpy()
                taken = each.activations.numpy()
                rows |= {f"{site}.{layer}": taken[site, layer] for site, layer in self._taps()}
            else:
                rows |= {f"{site}.{layer}": self._no_rows() for site, layer in self._taps()}
            for name, value in rows.items():
                found.setdefault(name, []).append(value)
        return {name: ragged(values) for name, values in found.items()}

    def _taps(self) -> list[tuple[str, int]]:
        capture, layers = self._job.capture, self._collector.origin.num_layers
        which = capture.layers.indices
        indices = range(layers) if which == "all" else sorted({int(i) % layers for i in which})
        return [(site, layer) for site in capture.sites.names for layer in indices]

    def _no_rows(self) -> Any:
        origin = self._collector.origin
        dtype = "float32" if origin.dtype == "bfloat16" else origin.dtype
        return np.zeros((0, origin.hidden_size), dtype)


def plain(value: Any) -> Any:
    """A cell of a NumPy column as JSON has it: Ray Data has lists as arrays."""
    if isinstance(value, np.ndarray):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def ragged(values: Sequence[Any]) -> Any:
    """A column whose cells may differ in shape, as an object array of them."""
    found = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        found[index] = value
    return found
