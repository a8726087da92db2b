"""Estimate of what a dataset capture writes, from its prompts and the model's configuration."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from midstream.codecs import parse_codec
from midstream.errors import SpecError
from midstream.lab.jobs.documents import PromptTokenizer
from midstream.lab.jobs.engine import plan_of
from midstream.lab.jobs.job import Job, check_model
from midstream.lab.jobs.prompt_tokens import PromptTokens
from midstream.lab.jobs.prompts import TokenisedLines
from midstream.lab.jobs.records import Failed, Record
from midstream.lab.jobs.sources import open_source
from midstream.plan.resolve.resolve import resolve
from midstream.plan.shape import ModelShape
from midstream.plan.tap_lookup import find_taps
from midstream.runtime.frontend.request.prompt.message_spans import has_media
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
    prompts: int  # that the engine gets; packed ones have many lines
    rows: int  # of all sites and layers
    token_bytes: int  # of one token, encoded
    nbytes: int  # of all rows, encoded
    stored_bytes: int  # of the store, approximately
    free_bytes: int | None  # None: it is not in a directory


def estimate_job(job: Job) -> JobEstimate:
    """Estimate a job by its first `SAMPLE` lines. No engine is started and nothing is written."""
    source, model = open_source(job), _Model(job)
    sample = list(islice(iter(source), SAMPLE + 1))
    lines = len(sample) if len(sample) <= SAMPLE else source.count() or job.limit
    if lines is None:
        raise SpecError("limit", f"the number of lines of {job.data} is unknown: give a limit")
    for record in sample:
        if isinstance(record, Failed) or isinstance(record.prompt, PromptTokens):
            continue
        if has_media(record.prompt):
            problem = "only an engine knows how many tokens media take"
            raise SpecError("data", f"line {record.line}: {problem}")
    del sample[SAMPLE:]
    records = TokenisedLines(job, source).prompts(sample) if job.is_tokenised else sample
    tokens, entry_bytes, prompts, problems = 0, 0, 0, list[str]()
    for record in records:
        try:
            tokens += model.count_tokens(record)
        except SpecError as error:
            problems.append(f"line {record.line}: {error}")
        else:
            prompts += 1
            entry_bytes += LINE_BYTES + _parts_bytes(record)
    share = lines / max(1, len(sample))
    tokens, failed = round(tokens * share), round(len(problems) * share)
    nbytes = tokens * model.token_bytes
    return JobEstimate(
        lines,
        failed,
        problems[0] if problems else "",
        round(prompts * share),
        tokens * len(model.taps),
        model.token_bytes,
        nbytes,
        nbytes + tokens * TOKEN_BYTES + round(entry_bytes * share),
        _free_bytes(job.out),
    )


def _parts_bytes(record: Record | Failed) -> int:
    """Return the size in the store of which document and role each token of a prompt is of."""
    if isinstance(record, Failed) or not isinstance(record.prompt, PromptTokens):
        return 0
    fields = record.prompt.parts.to_metadata()
    return len(json.dumps(fields, separators=(",", ":"))) if fields else 0


class _Model:
    """The model of a job, by its configuration, and its tokenizer."""

    def __init__(self, job: Job) -> None:
        from transformers import AutoConfig

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
        revision = job.revision or None
        config = AutoConfig.from_pretrained(job.model, revision=revision, **trust).get_text_config()
        self._tokenizer = PromptTokenizer(job)
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
        tokenizer, job, plan = self._tokenizer, self._job, self._job.plan
        if isinstance(record.prompt, PromptTokens):
            ids, plan = record.prompt.token_ids, plan_of(plan, record.prompt)
            prompt = tokenizer.prompt("", ids, False)
        else:
            ids = tokenizer.encode(record.prompt)
            prompt = tokenizer.prompt(record.prompt, ids, True)
        resolved = resolve(plan, self._shape, prompt, job.max_tokens)
        return resolved.expected_rows(len(ids) + job.max_tokens - 1, ())[self.taps[0]]


def _free_bytes(out: str) -> int | None:
    folder = folder_of(out)
    if not isinstance(folder, LocalFolder):
        return None
    path = Path(folder.root).absolute()
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
