"""Description of one dataset capture."""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from midstream.errors import SpecError
from midstream.plan import Capture, Plan
from midstream.plan.positions.positions import Positions
from midstream.plan.sink_target import MEMORY, read_name
from midstream.validation import at, kind, read_count, read_int, read_word, show

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
FORMATS = ("jsonl", "text", "csv", "tsv", "parquet")
FIRST = "first"
# Fields that decide which tokens a prompt has.
_OF_TOKENS = ("truncate", "pack", "separator", "exclude", "roles")
_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("model", "data", "out", "tag", "prompt_field", "subset", "split"), str),
    **dict.fromkeys(("revision", "dtype", "errors", "format", "exclude"), str),
    **dict.fromkeys(("chat", "keep_prompts", "record", "resume", "roles"), bool),
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
        data: a file; a Hugging Face dataset by name or folder, also one of `save_to_disk`; or `-`
            for standard input.
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
        record: store with each line its request and the bits of its results, for
            `midstream replay`.
        revision: revision of the model; empty: its default.
        dtype: dtype of the engine; `auto`: the model's own.
        engine_args: further arguments of `vllm.LLM`.
        resume: allow a store that has some of the lines already, and skip these.
        errors: file that lists the lines that could not be captured; empty: `errors.jsonl` in the
            store's directory, or none in an object store.
        format: of a file or standard input, `jsonl` (JSON lines, or one array), `text` (a prompt a
            line), `csv`, `tsv` or `parquet`; empty: by the file's name, else `jsonl`.
        truncate: number of tokens that a line is cut to, which are its first; None: it is not cut.
        pack: number of tokens of the prompts that lines, now called documents, are joined to; a
            long document goes on in the next prompt. Positions are those of each document. In the
            model, a token attends to all tokens before it in its prompt, also of other documents.
            None: each line is a prompt.
        separator: id of the token between two packed documents; None: the end-of-text token.
        exclude: `first`: the first token of each prompt, and of each packed document, has no rows.
        roles: store which tokens are of messages of each role, see `PromptParts.loss_mask`; only
            with `chat`. With this or `pack`, no generation prompt follows a conversation that ends
            with the assistant's message.
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
    format: str = ""
    truncate: int | None = None
    pack: int | None = None
    separator: int | None = None
    exclude: str = ""
    roles: bool = False
    flush_seconds: float = FLUSH_SECONDS
    record: bool = False

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
        for name, least in (("limit", 1), ("truncate", 1), ("pack", 2)):
            if getattr(self, name) is not None:
                with at(name):
                    read_count(getattr(self, name), least)
        with at("tag"):
            read_name(self.tag)
        if not 0 <= self.flush_seconds <= 86400:
            raise SpecError("flush_seconds", f"expected 0 to 86400, got {self.flush_seconds}")
        for name in self.engine_args:
            if name in _OWN_ARGUMENTS:
                raise SpecError(f"engine_args.{name}", "cannot be set for a dataset capture")
        for name, allowed in (("format", FORMATS), ("exclude", (FIRST,))):
            if getattr(self, name):
                with at(name):
                    read_word(getattr(self, name), allowed)
        if self.roles and not self.chat:
            raise SpecError("roles", "only conversations have roles: set `chat`")
        self._check_pack()
        with at("exclude" if self.exclude else ""):
            _ = self.plan

    def _check_pack(self) -> None:
        if self.separator is not None:
            with at("separator"):
                if read_int(self.separator) < 0 or self.pack is None:
                    raise SpecError("", "expected a token id, from 0, and `pack`")
        if self.pack is None:
            return
        if self.max_tokens != 1:
            raise SpecError("max_tokens", "packed prompts are not answered: leave it at 1")
        for name in ("max_rows", "reduce"):
            if getattr(self.capture, name):
                raise SpecError(f"capture.{name}", "is of a prompt, and a pack has many: omit it")
        longest = self.engine_args.get("max_model_len")
        if isinstance(longest, int) and self.pack >= longest:
            raise SpecError(
                "pack", f"expected less than engine_args.max_model_len, {longest}, got {self.pack}"
            )

    @property
    def is_tokenised(self) -> bool:
        """Whether the engine gets token ids, rather than texts and conversations."""
        return self.truncate is not None or self.pack is not None or self.roles

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
        positions = self.capture.positions
        if self.exclude:
            without = tuple(dict.fromkeys((*positions.exclude, 0)))
            positions = Positions(positions.include, positions.phase, without)
        return Plan(captures=(replace(self.capture, codec=self.codec, positions=positions),))

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
            # Left out unless set: stores of earlier releases have none of them.
            **{
                name: getattr(self, name)
                for name in _OF_TOKENS
                if getattr(self, name) not in (None, "") and getattr(self, name) is not False
            },
        }


def check_model(job: Job) -> None:
    """Raise SpecError for a model's folder that does not exist."""
    if job.model.startswith((".", "/")) and not os.path.exists(job.model):
        raise SpecError("model", f"there is no folder {show(job.model)}")
