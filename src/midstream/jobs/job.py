"""One dataset capture, as it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from midstream.errors import SpecError
from midstream.spec import Capture, Plan
from midstream.spec.sink_target import MEMORY, read_name
from midstream.validation import at, is_int, kind, show

FLUSH_SECONDS = 30.0

# What `Job` says itself, and what a job's engine must have as it is.
_OWN_ARGUMENTS = (
    "model",
    "revision",
    "dtype",
    "midstream",
    "additional_config",
    "layers",
    "include_prefill",
    "include_decode",
    "last_prefill_token",
    "last_decode_token",
    "enable_steering",
    "skip_tokenizer_init",
)
# Arguments of engines that change how fast rows come and not what is in them. A job that goes on
# elsewhere may have others; all that are not named here it must have again.
_HARMLESS_ARGUMENTS = frozenset(
    {
        "async_scheduling",
        "block_size",
        "cpu_offload_gb",
        "data_parallel_size",
        "disable_log_stats",
        "distributed_executor_backend",
        "download_dir",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "load_format",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "num_gpu_blocks_override",
        "pipeline_parallel_size",
        "swap_space",
        "tensor_parallel_size",
        "trust_remote_code",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to capture of which prompts, and where to.

    Attributes:
        model: its name or folder.
        data: a file of JSON lines or of Parquet, a data set of Hugging Face's by name or in a
            folder, or `-`, JSON lines on the standard input.
        out: the store's directory, or `s3://bucket/prefix`.
        capture: which rows. Its sink, tag and request_id are not set; they are the job's.
        max_tokens: how many tokens each prompt is answered with, at temperature 0. With 1 there
            are no rows but the prompt's.
        tag: of every request.
        prompt_field: which field of a line, or which column, has the prompt; empty: `text`, of
            conversations `messages`.
        chat: whether prompts are conversations, which the model's chat template writes out.
        subset: of a data set that has several.
        split: of a data set.
        limit: how many lines are read; None: all.
        keep_prompts: whether the prompt's text and the answer's are kept with the rows.
        revision: of the model; empty: its default.
        dtype: of the engine; `auto`: the model's own.
        engine_args: whatever else `vllm.LLM` takes.
        resume: whether the store may have some of the lines already, which are passed over then.
        errors: a file for the lines that could not be captured; empty: `errors.jsonl` in the
            store's directory, or none in an object store.
        flush_seconds: how long what came may wait to be written. It is what a kill costs.

    Raises:
        SpecError: a field is malformed; its path is that field.
    """

    model: str
    data: str
    out: str
    capture: Capture
    max_tokens: int = 1
    tag: str = ""
    prompt_field: str = ""
    chat: bool = False
    subset: str = ""
    split: str = "train"
    limit: int | None = None
    keep_prompts: bool = False
    revision: str = ""
    dtype: str = "auto"
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False
    errors: str = ""
    flush_seconds: float = FLUSH_SECONDS

    def __post_init__(self) -> None:
        for name in ("model", "data", "out"):
            if not getattr(self, name):
                raise SpecError(name, "expected a name or path, got nothing")
        if self.capture.place != (MEMORY, "", "") or self.capture.metadata:
            raise SpecError(
                "capture", "leave out sink, tag, request_id and metadata: they are the job's"
            )
        for name, least in (("max_tokens", 1), ("limit", 1)):
            _check_count(name, getattr(self, name), least)
        with at("tag"):
            read_name(self.tag)
        if not 0 <= self.flush_seconds <= 86400:
            raise SpecError("flush_seconds", f"expected 0 to 86400, got {self.flush_seconds}")
        for name in self.engine_args:
            if name in _OWN_ARGUMENTS:
                raise SpecError(f"engine_args.{name}", "it is not to be set here")

    @property
    def column(self) -> str:
        """The field or column that has the prompt."""
        return self.prompt_field or ("messages" if self.chat else "text")

    @property
    def codec(self) -> str:
        """How the rows are encoded, every parameter written out."""
        return self.capture.codec or "raw"

    @property
    def plan(self) -> Plan:
        """What every request asks for."""
        return Plan(captures=(replace(self.capture, codec=self.codec),))

    @property
    def terms(self) -> dict[str, Any]:
        """All that decides, besides the prompt, what is in a request's rows; and the tag. A store
        has lines that were captured on the same terms.
        """
        (capture,) = self.plan.captures
        return {
            "model": self.model,
            "revision": self.revision,
            "dtype": self.dtype,
            **capture.to_dict(),
            "max_tokens": self.max_tokens,
            "chat": self.chat,
            "tag": self.tag,
            "engine_args": {
                name: value
                for name, value in sorted(self.engine_args.items())
                if name not in _HARMLESS_ARGUMENTS
            },
        }


def _check_count(name: str, value: object, least: int) -> None:
    if value is None and name == "limit":
        return
    if not is_int(value):
        raise SpecError(name, f"expected `int`, got {kind(value)}")
    if int(value) < least:
        raise SpecError(name, f"expected at least {least}, got {show(int(value))}")
