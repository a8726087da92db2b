"""Estimate of what a dataset capture writes, from its prompts and the model's configuration."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from midstream.codecs import parse_codec
from midstream.errors import SpecError
from midstream.lab.jobs.engine import check_model
from midstream.lab.jobs.job import Job
from midstream.lab.jobs.records import Failed, Record
from midstream.lab.jobs.sources import open_source
from midstream.plan.positions.decoded_text import text_map
from midstream.plan.positions.items import CONTENT
from midstream.plan.positions.prompt import Prompt
from midstream.plan.resolve.resolve import resolve
from midstream.plan.shape import ModelShape
from midstream.plan.tap_lookup import find_taps
from midstream.runtime.frontend.request.prompt.message_spans import has_media, message_spans
from midstream.sites import ENDS, INNER, OUTER
from midstream.store.backends.local import LocalFolder, folder_of
from midstream.validation import listed

# Lines that are read; the others count as these do on average.
SAMPLE = 10_000
# Bytes of a store beside the rows, of each captured token and of each line, as measured.
TOKEN_BYTES, LINE_BYTES = 20, 850
DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")


@dataclass(frozen=True, slots=True)
class JobEstimate:
    """What a job writes, at most: a generated text may end early. Sizes are in bytes."""

    lines: int
    failed: int  # of the lines
    problem: str  # why the first of them has no rows
    rows: int  # of all sites and layers
    token_bytes: int  # of one token, encoded
    nbytes: int  # of all rows, encoded
    stored_bytes: int  # of the store, approximately
    free_bytes: int | None  # None: it is not in a directory


def estimate_job(job: Job) -> JobEstimate:
    """Estimate a job by its first `SAMPLE` prompts. No engine is started and nothing is written."""
    source, model = open_source(job), _Model(job)
    sample = list(islice(iter(source), SAMPLE + 1))
    lines = len(sample) if len(sample) <= SAMPLE else source.count() or job.limit
    if lines is None:
        raise SpecError("limit", f"the number of lines of {job.data} is unknown: give a limit")
    for record in sample:
        if isinstance(record, Record) and has_media(record.prompt):
            problem = "only an engine knows how many tokens media take"
            raise SpecError("data", f"line {record.line}: {problem}")
    counts, problems = list[int](), list[str]()
    for record in sample[:SAMPLE]:
        try:
            counts.append(model.count_tokens(record))
        except SpecError as error:
            problems.append(f"line {record.line}: {error}")
    share = lines / max(1, len(counts) + len(problems))
    tokens, failed = round(sum(counts) * share), round(len(problems) * share)
    nbytes = tokens * model.token_bytes
    stored_bytes = nbytes + tokens * TOKEN_BYTES + (lines - failed) * LINE_BYTES
    problem = problems[0] if problems else ""
    rows, free = tokens * len(model.taps), _free_bytes(job.out)
    return JobEstimate(lines, failed, problem, rows, model.token_bytes, nbytes, stored_bytes, free)


class _Model:
    """The model of a job, by its configuration, and its tokenizer."""

    def __init__(self, job: Job) -> None:
        from transformers import AutoConfig, AutoTokenizer

        check_model(job)
        sites, options = job.capture.sites, job.engine_args
        if inner := [name for name in sites.names if name in INNER]:
            raise SpecError("sites", f"only an engine knows the width of {listed(inner)}")
        if changes := sorted({"hf_overrides", "hf_config_path"} & options.keys()):
            raise SpecError(
                f"engine_args.{changes[0]}", "an estimate reads the model's config.json"
            )
        if job.dtype not in DTYPES:
            raise SpecError("dtype", f"expected {listed(DTYPES)}, got {job.dtype}")
        trust = {"trust_remote_code": options.get("trust_remote_code", False)}
        revision, tokenizer = job.revision or None, options.get("tokenizer", job.model)
        config = AutoConfig.from_pretrained(job.model, revision=revision, **trust).get_text_config()
        revision = options.get("tokenizer_revision", revision)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer, revision=revision, **trust)
        self._job, layers = job, range(config.num_hidden_layers)
        taps = [(site, layer) for site in OUTER for layer in layers]
        taps += [(site, layers[layer]) for site, layer in ENDS.items()]
        self._shape = ModelShape(len(layers), config.hidden_size, taps)
        self.taps = find_taps(job.capture.layers, sites, self._shape, "layers", "sites")
        # vLLM computes in bfloat16 where a configuration has float32 or none.
        dtype: Any = config.dtype if job.dtype == "auto" else getattr(torch, job.dtype)
        if job.dtype == "auto" and dtype in (None, torch.float32):
            dtype = torch.bfloat16
        row_bytes = parse_codec(job.codec).row_bytes(config.hidden_size, dtype)
        self.token_bytes = len(self.taps) * row_bytes

    def count_tokens(self, record: Record | Failed) -> int:
        """Return the number of a line's tokens that have rows."""
        if isinstance(record, Failed):
            raise SpecError("", record.reason)
        tokenizer, job = self._tokenizer, self._job
        ids = _token_ids(tokenizer, record.prompt)
        chat: Any = None if isinstance(record.prompt, str) else record.prompt

        def messages(part: str = CONTENT) -> Any:
            return message_spans(tokenizer, chat, ids, part=part, add_generation_prompt=True)

        prompt = Prompt(
            len(ids),
            ids,
            lambda: text_map(tokenizer, ids),
            chat and messages,
        )
        plan = resolve(job.plan, self._shape, prompt, job.max_tokens)
        return plan.expected_rows(len(ids) + job.max_tokens - 1, ())[self.taps[0]]


def _token_ids(tokenizer: Any, prompt: Any) -> tuple[int, ...]:
    from jinja2 import TemplateError

    try:
        if isinstance(prompt, str):
            return tuple(tokenizer.encode(prompt))
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    except (ValueError, TypeError, LookupError, TemplateError) as error:
        raise SpecError("", f"{type(error).__name__}: {error}") from error


def _free_bytes(out: str) -> int | None:
    folder = folder_of(out)
    if not isinstance(folder, LocalFolder):
        return None
    path = Path(folder.root).absolute()
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
