"""Twelve families by their published shapes (families.json) with random weights: captures, edits
and probes against plain hooks on vLLM's own modules, and then the same requests compiled.

`python -m support.families [NAME …] [--tiny]` runs them, as many at once as a GPU of 139 GiB takes,
by the runner of `VLLM_USE_V2_MODEL_RUNNER`, and prints a line each; `--tiny`: small copies, on a
CPU. The requests are the doctor's: every site of every layer captured, `Steer` at each site outside
attention and the MLP of up to four layers, and probes. The last line is the reports as JSON.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from midstream.lab.tools.doctor import cases, compare, formulas
from midstream.lab.tools.doctor.cases import Case
from midstream.sites import OUTER, Tap
from support.engines import _TRACED, ENVIRONMENT, HAS_GPU

FAMILIES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
GIB, AT_ONCE, SECONDS = 132, 6, 240
SEED = 0
# A matrix makes a vector this much longer: attention and the MLP then change the stream by about as
# much as there is.
GAIN = 1.2
# Error of a row that counts as another one, and the share of such rows. Hooks and the engine run
# the same kernels, so all rows are the same; an edit's last digit may come out otherwise, and then
# choose another of hundreds of experts for a token, whose row differs in part from there on.
HOOKS, HOOKS_EXPERTS = (0.04, 0.0), (0.25, 0.3)
# Inductor rounds less often than the eager model. A row of another place differs by 1 or more. With
# experts, most rows of a later layer may be those of other experts: the share is printed, and what
# is judged are an edit's own rows and the scores, within the compiled engine.
COMPILED, COMPILED_EXPERTS = (0.25, 0.25), (0.5, 1.0)
EXACT = 0.04  # of an edit's own rows, and of scores
MOVED = 0.02  # of the next token's logits, by an edit
Figures = dict[str, Any]


class Job(NamedTuple):
    """One engine of a family; a compiled one runs what the eager one left in its folder."""

    name: str
    compiled: bool
    tiny: bool
    folder: str

    @property
    def cases(self) -> Path:
        return Path(self.folder, f"{self.name}.pt")

    @property
    def log(self) -> Path:
        return Path(self.folder, f"{self.name}-{'compiled' if self.compiled else 'eager'}.log")

    @property
    def other(self) -> tuple[float, float]:
        """The error of a row that counts as another one, and the share of such rows."""
        if self.compiled:
            return COMPILED_EXPERTS if FAMILIES[self.name].get("experts") else COMPILED
        return HOOKS_EXPERTS if FAMILIES[self.name].get("experts") else HOOKS


class Seen(NamedTuple):
    """What the requests of one engine showed: (largest error, where) of each kind; `plain` is of
    requests without an edit, and `off` the share of rows that are others.
    """

    plain: tuple[float, str]
    rows: tuple[float, str]
    off: tuple[float, str]
    edits: tuple[float, str]
    probes: tuple[float, str]


def fields_of(name: str, tiny: bool) -> dict[str, Any]:
    """Return the fields of a family's configuration, or of a small copy's."""
    from midstream.lab.tools.doctor.model_copy import (
        is_multimodal,
        read_config,
        small_config,
        small_whole,
    )
    from midstream.lab.tools.doctor.small_config import Size

    family = FAMILIES[name]
    fields: dict[str, Any] = family["config"]
    if not tiny:
        return fields
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**fields, **family.get("cpu", {})}))
        config = read_config(folder)
    whole = small_whole if is_multimodal(config) else small_config
    small: dict[str, Any] = whole(config, Size()).to_dict()
    return {**small, "architectures": fields["architectures"]}


@contextmanager
def started(job: Job) -> Iterator[Any]:
    """The engine of a job."""
    from midstream.lab.tools.doctor.drawn_images import IMAGE_SETTINGS, drawn_images
    from midstream.lab.tools.doctor.engine import engine
    from midstream.lab.tools.doctor.model_copy import drawn_weights

    fields = fields_of(job.name, job.tiny)
    settings: dict[str, Any] = {
        "load_format": drawn_weights(SEED, GAIN),
        "enforce_eager": not job.compiled,
        "max_num_seqs": 4,
        **FAMILIES[job.name].get("engine", {}),
    }
    if HAS_GPU:
        # With the size of the cache given, vLLM does not measure memory, which others use as well.
        settings |= {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 3 << 30}
        graphs: dict[str, Any] = {"cudagraph_capture_sizes": [1, 2, 4]}
    else:
        graphs = _TRACED
    if job.compiled:
        settings["compilation_config"] = graphs
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        Path(folder, "config.json").write_text(json.dumps(fields), encoding="utf-8")
        if "vision_config" in fields:
            settings = {**IMAGE_SETTINGS, **settings}
            stack.enter_context(drawn_images(folder))
        dtype = FAMILIES[job.name].get("cpu_dtype", "float32") if job.tiny else "bfloat16"
        yield stack.enter_context(engine(folder, dtype, **settings))


def taps_of(llm: Any) -> dict[Tap, str]:
    """Return each site of each layer, with why the model lacks it; empty if it does not."""
    from midstream.results.site_table import SiteTable

    states = SiteTable.of(llm.info.shape).states
    return {(state.site, state.layer): "" if state.tapped else state.reason for state in states}


def run_job(job: Job) -> Figures:
    """Run one engine; return its figures, with an outcome and what is wrong."""
    if job.compiled and not job.cases.exists():
        return {"outcome": "failed", "reason": "the eager engine left no requests"}
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(log, number)
    with started(job) as llm:
        figures = against_graphs(llm, job) if job.compiled else against_hooks(llm, job)
        config = llm.llm_engine.vllm_config
        figures["compiled"] = bool(config.compilation_config.mode)
        figures["runner"] = "v2" if getattr(config, "use_v2_model_runner", False) else "v1"
        if HAS_GPU:
            figures["gib"] = torch.cuda.max_memory_reserved() / 2**30
    problems = figures["problems"]
    return {**figures, "outcome": "wrong" if problems else "ok", "reason": "; ".join(problems)}


def against_hooks(llm: Any, job: Job) -> Figures:
    """Compare with hooks on the model without taps; leave the cases for the compiled engine."""
    from midstream.lab.tools.doctor.drawn_images import DRAWN, image_requests
    from midstream.lab.tools.doctor.own_modules import OwnModules

    own = OwnModules(llm)
    images = DRAWN if "vision_config" in FAMILIES[job.name]["config"] else ""
    for request in image_requests(llm, images, "", SEED):
        own.add_image(request)
    own.find_sites(cases.prompts(own.vocabulary, SEED)[-1])
    plain = cases.plain_cases(own, SEED)
    states = taps_of(llm)
    asked = cases.operation_cases(own, SEED, ("Probe",))
    asked = [case for case in asked if case.tap and not states[case.tap]]
    seen = judge(llm, [*plain, *asked], job)
    outer = [tap for tap, lacking in states.items() if tap[0] in OUTER and not lacking]
    unseen = sorted({f"{site} {layer}" for site, layer in outer if own.missing((site, layer))})
    edits = [case for case in asked if case.edit is not None]
    moved = min((_moved(case, plain), _name(case)) for case in edits)
    problems = limits(seen, job)
    weakest = min((case.effect, _name(case)) for case in edits)
    if weakest[0] < compare.LEAST_EFFECT * EXACT or moved[0] < MOVED:
        problems.append(f"an edit changes too little to verify: {weakest}, {moved}")
    lost = [name for name in unseen if name.startswith(("resid_pre", "resid_post"))]
    problems += [f"the stream was not compared at {lost}"] if lost else []
    middle = len(own.layers) // 2
    kept = [case for case in asked if case.probe is not None or case.prompt in own.image_prompts]
    kept += [case for case in edits if case.tap == ("resid_post", middle)]
    empty = torch.empty(0)
    torch.save([replace(case, logits=empty) for case in [*plain, *kept]], job.cases)
    return {
        **seen._asdict(),
        "problems": problems,
        "sites": len(outer) - len(unseen),
        "unseen": unseen,
        "tapped": sum(not lacking for lacking in states.values()),
        "layers": len(own.layers),
        "images": len(own.image_prompts),
        "requests": len(plain) + len(asked),
        "moved": moved,
    }


def against_graphs(llm: Any, job: Job) -> Figures:
    """Compare with what hooks showed in the eager engine, and within this one exactly."""
    left = torch.load(job.cases, weights_only=False)
    seen = judge(llm, left, job)
    problems = limits(seen, job)
    return {**seen._asdict(), "problems": problems, "requests": len(left)}


def limits(seen: Seen, job: Job) -> list[str]:
    """Return what exceeds the limits."""
    share, where = seen.off
    problems = [f"{share:.0%} of rows are others: {where}"] if share > job.other[1] else []
    if not math.isfinite(seen.rows[0]):
        problems.append(f"no rows to compare: {seen.rows[1]}")
    if not job.compiled and seen.plain[0] > HOOKS[0]:
        problems.append("rows without an edit differ by {:.1e} at {}".format(*seen.plain))
    for kind, (error, where) in (("edit", seen.edits), ("probe", seen.probes)):
        if not error <= EXACT:
            problems.append(f"{kind} {where}: off by {error:.1e}")
    return problems


def judge(llm: Any, asked: Sequence[Case], job: Job) -> Seen:
    """Run the requests one by one and compare with what hooks showed. In a compiled engine an
    edit's own rows are compared with this engine's rows without it, edited by the formula, and
    scores with this engine's rows.
    """
    from midstream.lab.tools.doctor.engine import run_cases

    taps = [tap for tap, lacking in taps_of(llm).items() if not lacking]
    unedited, rows, off, edits, probes = ([(0.0, "")] for _ in Seen._fields)
    plain: dict[tuple[int, ...], Mapping[Tap, Tensor]] = {}
    for case in asked:
        output = run_cases(llm, [case], taps)[0]
        if output.receipt.problems:
            rows.append((math.inf, f"{_name(case)}: {output.receipt.problems}"))
        found = {tap: value.double().flatten(1) for tap, value in output.activations.items()}
        if case.tap is None:
            plain[tuple(case.prompt)] = found
        count = _same(case, output)
        for tap in found.keys() & case.values.keys():
            errors = row_errors(found[tap][:count], case.values[tap][:count].double())
            where = f"{tap[0]} {tap[1]}" + (f" ({_name(case)})" if case.tap else "")
            rows.append((float(errors.max()), where))
            if case.edit is None:
                unedited.append(rows[-1])
            off.append((float((errors > job.other[0]).double().mean()), where))
        if case.tap is None:
            continue
        prompt = len(case.prompt)
        if case.edit is not None:
            expected = case.values[case.tap].double()
            if job.compiled:
                before = plain[tuple(case.prompt)][case.tap][:prompt]
                expected = formulas.apply(case.edit, before, case.heads)
            count = prompt if job.compiled else count
            error = row_errors(found[case.tap][:count], expected[:count]).max()
            edits.append((float(error), _name(case)))
        if case.probe is not None:
            values = found[case.tap] if job.compiled else case.values[case.tap]
            expected = formulas.score(case.probe, values, case.heads)[:count]
            gap = (output.probes["score"].double()[:count] - expected).abs().max()
            probes.append((float(gap / expected.abs().max()), _name(case)))
    return Seen(max(unedited), max(rows), max(off), max(edits), max(probes))


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the relative error of each row [T]; see `compare.row_error`."""
    if actual.shape != expected.shape:
        return torch.full((1,), math.inf)
    lengths = expected.norm(dim=-1)
    errors = (actual - expected).norm(dim=-1) / lengths.clamp_min(0.1 * float(lengths.median()))
    return errors.nan_to_num(nan=math.inf)


def _name(case: Case) -> str:
    return f"{case.name} at {case.tap[0]} {case.tap[1]}" if case.tap else "plain"


def _same(case: Case, output: Any) -> int:
    """Return the number of rows of the same tokens."""
    generated = list(output.outputs[0].token_ids)
    for index, (ours, theirs) in enumerate(zip(generated, case.tokens, strict=True)):
        if ours != theirs:
            return len(case.prompt) + index
    return len(case.prompt) + len(generated) - 1


def _moved(case: Case, plain: Sequence[Case]) -> float:
    """Return how much an edit changes the logits of the token after the prompt, relative to how far
    they are from their mean.
    """
    last = len(case.prompt) - 1
    before = next(other for other in plain if other.prompt == case.prompt).logits[last]
    first, second = (logits - logits.mean() for logits in (before, case.logits[last]))
    return float((second - first).norm() / first.norm())


def room(job: Job, running: Sequence[Job]) -> bool:
    """Return whether a job may start beside others: its memory is there, and what it compares."""
    gib = sum(FAMILIES[other.name]["gib"] for other in [job, *running])
    waits = any(other.name == job.name for other in running)
    return gib <= GIB and not (job.compiled and waits)


def run(
    names: Sequence[str], tiny: bool, folder: str, at_once: int
) -> Iterator[tuple[str, Figures]]:
    """Yield (name, figures of both engines) as families end, largest first."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
    from survey_processes import run_each

    ordered = sorted(names, key=lambda name: -FAMILIES[name]["gib"])
    jobs = [Job(name, compiled, tiny, folder) for compiled in (False, True) for name in ordered]
    eager: dict[str, tuple[Figures, float]] = {}
    limit = SECONDS if HAS_GPU else 4 * SECONDS
    for job, figures, seconds in run_each(jobs, run_job, limit, at_once, room):
        if "rows" not in figures and job.log.exists():
            figures["log"] = job.log.read_text(errors="replace")[-3000:]
        if not job.compiled:
            eager[job.name] = figures, seconds
            continue
        first, before = eager[job.name]
        yield job.name, {"hooks": first, "graphs": figures, "seconds": [before, seconds]}


def line(name: str, found: Figures) -> str:
    """Return the line of one family."""
    hooks, graphs = found["hooks"], found["graphs"]
    seconds = "{:.0f} and {:.0f} s".format(*found["seconds"])
    both = (hooks, graphs)
    said = [f"{each['outcome']}: {each['reason']}" for each in both if each["outcome"] != "ok"]
    if not {"rows", "runner"} <= hooks.keys():
        return f"families {name} {said}, {seconds}"
    text = (
        f"families {name} {hooks['runner']}: {hooks['sites']} sites of {hooks['layers']} layers, "
        f"{hooks['images']} image, {_figures(hooks)}, moved {hooks['moved'][0]:.2g} at least"
    )
    if "rows" in graphs:
        text += f"; compiled: {_figures(graphs)}"
    gib = ", ".join(f"{each['gib']:.0f} GiB" for each in both if "gib" in each)
    return "; ".join([text, seconds, *([gib] if gib else []), *said])


def _figures(found: Figures) -> str:
    plain, row, off, edit, probe = (found[kind][0] for kind in Seen._fields)
    return (
        f"worst row {plain:.1e}, with an edit {row:.1e} ({off:.0%} others), edit {edit:.1e}, "
        f"probe {probe:.1e}"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the families named, or all; return 1 if anything is wrong."""
    tiny = "--tiny" in arguments
    names = [name for name in arguments if not name.startswith("--")] or list(FAMILIES)
    os.environ.update({**ENVIRONMENT, "TQDM_DISABLE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    _import_once()
    reports: dict[str, Figures] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="midstream-families-") as folder:
        for name, found in run(names, tiny, folder, AT_ONCE if HAS_GPU else 1):
            reports[name] = found
            sys.stdout.write(f"{line(name, found)}\n")
            sys.stdout.flush()
    sys.stdout.write(f"families: {time.monotonic() - began:.0f} s\n{json.dumps(reports)}\n")
    ended = [each[kind] for each in reports.values() for kind in ("hooks", "graphs")]
    return int(any(each["outcome"] != "ok" for each in ended) or len(reports) < len(names))


def _import_once() -> None:
    """Import vLLM ahead of the processes that are forked from here."""
    import gc

    import transformers  # noqa: F401
    import vllm.model_executor.models.llama  # noqa: F401
    from vllm.model_executor.models import registry

    import midstream.api.llm
    import midstream.lab.tools.doctor.own_modules  # noqa: F401

    registry._run_in_subprocess = lambda read: read()
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
