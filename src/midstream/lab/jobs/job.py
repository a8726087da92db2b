"""Description of one dataset capture."""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from midstream.errors import SpecError
from midstream.plan import Capture, Plan
from midstream.plan.sink_target import MEMORY, read_name
from midstream.validation import at, kind, read_count

FLUSH_SECONDS = 30.0

# Engine arguments that `Job` sets itself, or that a job's engine must leave at their default.
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
# Engine arguments that affect speed but not the captured values. A resumed job may change these,
# and no others.
_HARMLESS_ARGUMENTS = frozenset(
    {
        "allowed_local_media_path",
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
        "limit_mm_per_prompt",
        "load_format",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "mm_processor_cache_gb",
        "num_gpu_blocks_override",
        "pipeline_parallel_size",
        "swap_space",
        "tensor_parallel_size",
        "trust_remote_code",
    }
)


# The split of a Hugging Face dataset that is read by default.
SPLIT = "train"
_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("model", "data", "out", "tag", "prompt_field", "subset", "split"), str),
    **dict.fromkeys(("revision", "dtype", "errors"), str),
    **dict.fromkeys(("chat", "keep_prompts", "resume"), bool),
    "capture": Capture,
    "engine_args": Mapping,
    "flush_seconds": numbers.Real,
}
_WORDS: Mapping[str, str] = {"engine_args": "a dict", "flush_seconds": "a number"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to capture from which prompts, and where to store it.

    Attributes:
        model: name or folder of the model.
        data: a JSON lines or Parquet file, a Hugging Face dataset by name or folder, or `-` for
            JSON lines on standard input.
        out: directory of the store, or `s3://bucket/prefix`.
        capture: rows to capture. Its sink, tag, request_id, metadata and heads must not be set; the
            job sets them.
        max_tokens: number of tokens to generate per prompt, at temperature 0. With 1, only the
            prompt has rows.
        tag: tag of every request.
        prompt_field: field of a line, or column, with the prompt; empty: `text`, or `messages` for
            conversations.
        chat: prompts are conversations, formatted by the model's chat template.
        subset: subset of a Hugging Face dataset that has several.
        split: split of a Hugging Face dataset.
        limit: number of lines to read; None: all.
        keep_prompts: store the texts of prompt and answer with the rows.
        revision: revision of the model; empty: its default.
        dtype: dtype of the engine; `auto`: the model's own.
        engine_args: further arguments of `vllm.LLM`.
        resume: allow a store that has some of the lines already, and skip these.
        errors: file that lists the lines that could not be captured; empty: `errors.jsonl` in the
            store's directory, or none in an object store.
        flush_seconds: longest time that captured rows wait to be written, in seconds; at most this
            much work is lost if the job is killed.

    Raises:
        SpecError: a field is malformed; the path is its name.
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
    split: str = SPLIT
    limit: int | None = None
    keep_prompts: bool = False
    revision: str = ""
    dtype: str = "auto"
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False
    errors: str = ""
    flush_seconds: float = FLUSH_SECONDS

    def __post_init__(self) -> None:
        for name in ("model", "data", "out", "errors"):
            value = getattr(self, name)
            object.__setattr__(
                self, name, os.fspath(value) if isinstance(value, os.PathLike) else value
            )
        for name, known in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, known) or (isinstance(value, bool) and known is not bool):
                words = _WORDS.get(name, f"`{known.__name__}`")
                raise SpecError(name, f"expected {words}, got {kind(value)}")
        for name in ("model", "data", "out"):
            if not getattr(self, name):
                raise SpecError(name, "expected a name or path, got nothing")
        if self.capture.place != (MEMORY, "", "") or self.capture.metadata:
            raise SpecError(
                "capture", "leave out sink, tag, request_id and metadata: the job sets them"
            )
        if type(self.capture) is not Capture:
            raise SpecError("capture", "a store has activations; give a `Capture`")
        if self.capture.heads is not None:
            raise SpecError("capture.heads", "leave out: a store has whole vectors")
        with at("max_tokens"):
            read_count(self.max_tokens, 1)
        if self.limit is not None:
            with at("limit"):
                read_count(self.limit, 1)
        with at("tag"):
            read_name(self.tag)
        if not 0 <= self.flush_seconds <= 86400:
            raise SpecError("flush_seconds", f"expected 0 to 86400, got {self.flush_seconds}")
        for name in self.engine_args:
            if name in _OWN_ARGUMENTS:
                raise SpecError(f"engine_args.{name}", "cannot be set for a dataset capture")

    @property
    def column(self) -> str:
        """Name of the field or column with the prompt."""
        return self.prompt_field or ("messages" if self.chat else "text")

    @property
    def media_files(self) -> str:
        """Folder that files of conversations may be in; empty: none."""
        return str(self.engine_args.get("allowed_local_media_path") or "")

    @property
    def codec(self) -> str:
        """Codec spec of the rows."""
        return self.capture.codec or "raw"

    @property
    def plan(self) -> Plan:
        """Plan of every request."""
        return Plan(captures=(replace(self.capture, codec=self.codec),))

    @property
    def terms(self) -> dict[str, Any]:
        """Settings that, with the prompt, determine a request's rows; and the tag. All lines of a
        store are captured with the same terms.
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
