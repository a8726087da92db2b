"""Examination of one architecture by the doctor, for scripts/models_survey.py."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import survey_multimodal
import survey_processors
import survey_settings
from survey_bare import BARE

OWN, BACKEND = "vLLM", "Transformers backend"
UNREAD = "failed to be inspected"
NO_MODEL = "transformers has no such model; its code comes with its weights, and is never run here"


@dataclass(frozen=True)
class Candidate:
    """One architecture.

    Attributes:
        name: name in vLLM's registry, or in transformers if vLLM has no own model of it.
        runs: OWN or BACKEND.
        model_type: model type of transformers' configuration; empty if transformers has none.
        multimodal: whether it is in vLLM's list of multimodal models.
    """

    name: str
    runs: str
    model_type: str
    multimodal: bool = False


@dataclass(frozen=True)
class EngineSettings:
    """Settings of all engines.

    Attributes:
        on_gpu: run on a CUDA device, in bfloat16; else on a CPU, in float32 where that works.
    """

    on_gpu: bool = False

    def dtype_for(self, candidate: Candidate) -> str:
        """Return the dtype of an architecture's engine."""
        needs = {candidate.name, candidate.model_type} & set(survey_settings.BFLOAT16)
        return "bfloat16" if needs or self.on_gpu else "float32"

    def engine(self) -> dict[str, Any]:
        """Return further arguments of an engine."""
        # With the size of the cache given, vLLM does not measure memory, which others use as well.
        few = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 31}
        return few if self.on_gpu else {}


def examine(candidate: Candidate, settings: EngineSettings) -> dict[str, Any]:
    """Return the doctor's report; for a multimodal class with an image if one can be made here."""
    from midstream.lab.tools.doctor.report import UNBUILT

    if candidate.name in {**survey_multimodal.BARE, **BARE}:
        said = _examine_bare(candidate, settings)
    elif candidate.name in survey_processors.FAMILIES:
        said = _examine_processed(candidate, settings)
        if said["outcome"] == UNBUILT:
            said = {**_examine_small(candidate, settings), "without": said["reason"]}
    elif candidate.model_type:
        said = _examine_small(candidate, settings)
    else:
        return {"outcome": UNBUILT, "reason": NO_MODEL}
    if UNREAD in said["reason"]:
        said["reason"] = f"vLLM cannot load it here: {_why_unread(candidate.name)}"
    # Remove the arguments that pydantic appends, and this host's folders.
    reason = re.sub(r"[^\s('\"]*/site-packages/", "", said["reason"].split(" [type=")[0])
    # transformers lists all of its hundreds of classes.
    reason = re.sub(r"\. Model type should be one of .*", "", reason, flags=re.DOTALL)
    return {**said, "reason": reason}


def _examine_bare(candidate: Candidate, settings: EngineSettings) -> dict[str, Any]:
    """Examine a class by a whole configuration, as it is written here."""
    from midstream.lab.tools.doctor.drawn_images import DRAWN
    from midstream.lab.tools.doctor.examine import Options, examine
    from midstream.lab.tools.doctor.model_copy import drawn_weights, unknown_config
    from midstream.lab.tools.doctor.report import UNBUILT

    bare = {**survey_multimodal.BARE, **BARE}
    on_gpu = survey_settings.ON_GPU if settings.on_gpu else {}
    fields = {
        **bare[candidate.name],
        "architectures": [candidate.name],
        **on_gpu.get(candidate.name, {}),
    }
    unknown_config(copy.deepcopy(fields))
    reasons = []
    runs: list[tuple[str, dict[str, Any]]] = [("", {})]
    if candidate.name in survey_multimodal.BARE:
        runs = [(DRAWN, {}), ("", {"language_model_only": True})]
    for images, only in runs:
        with tempfile.TemporaryDirectory(prefix="midstream-survey-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(fields), encoding="utf-8")
            if candidate.name in survey_multimodal.TOKENIZERS:
                marks = survey_multimodal.TOKENIZERS[candidate.name]
                survey_processors.tokenizer(marks).save_pretrained(folder)
            engine = {"load_format": drawn_weights(0), **settings.engine(), **only}
            options = Options(
                folder,
                size=None,
                dtype=settings.dtype_for(candidate),
                images=images,
                engine=tuple(engine.items()),
            )
            said = examine(options).to_dict()
        if said["outcome"] != UNBUILT:
            break
        reasons.append(said["reason"])
    if said["outcome"] != UNBUILT:
        reasons = [said["reason"], *(f"without an image: {reason}" for reason in reasons)]
    return {**said, "reason": "; ".join(dict.fromkeys(reasons))}


def _examine_processed(candidate: Candidate, settings: EngineSettings) -> dict[str, Any]:
    """Examine a tiny multimodal model whose image goes through its processor and its tower."""
    from midstream.lab.tools.doctor.drawn_images import PROCESSED
    from midstream.lab.tools.doctor.examine import Options, examine
    from midstream.lab.tools.doctor.report import UNBUILT

    with tempfile.TemporaryDirectory(prefix="midstream-survey-") as folder:
        try:
            text = survey_processors.save(candidate.name, Path(folder))
        except ImportError as error:
            return {"outcome": UNBUILT, "reason": f"no processor of it can be made: {error}"}
        options = Options(
            folder,
            size=None,
            dtype=settings.dtype_for(candidate),
            images=PROCESSED,
            text=text,
            engine=tuple(settings.engine().items()),
        )
        return examine(options).to_dict()


def _examine_small(candidate: Candidate, settings: EngineSettings) -> dict[str, Any]:
    """Examine a small random copy, of a configuration."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    from midstream.lab.tools.doctor.examine import Options, examine_config

    engine = settings.engine()
    if candidate.name in survey_settings.LEFT_TO_THE_BACKEND:
        engine["model_impl"] = "transformers"
    fields = survey_settings.SETTINGS.get(candidate.model_type, {})
    if settings.on_gpu:
        fields = {**fields, **survey_settings.ON_GPU.get(candidate.model_type, {})}
    try:
        if candidate.multimodal:
            config = survey_multimodal.config_of(candidate.name, candidate.model_type)
        else:
            config = CONFIG_MAPPING[candidate.model_type](**fields)
    except (KeyError, ValueError, TypeError, StrictDataclassError) as error:
        # Of releases of transformers, some lack the type, and some check its fields.
        reason = f"no configuration of it can be made: {type(error).__name__}: {error}"
        return {"outcome": "cannot be built", "reason": reason}
    options = Options(
        candidate.name,
        dtype=settings.dtype_for(candidate),
        architecture=None if candidate.multimodal else candidate.name,
        engine=tuple(sorted(engine.items())),
    )
    said = examine_config(options, config).to_dict()
    return _of_the_whole(candidate, said) if candidate.multimodal else said


def _of_the_whole(candidate: Candidate, said: dict[str, Any]) -> dict[str, Any]:
    """Return a report on a multimodal class; what was found of its language model alone in another
    class is not of this one.
    """
    from vllm.model_executor.models import registry

    served = registry._MULTIMODAL_MODELS[candidate.name][1]  # noqa: SLF001
    if said["outcome"] != "ok" or said["architecture"] == served:
        return said
    return {"outcome": "cannot be built", "reason": said["reason"]}


def _why_unread(name: str) -> str:
    """Return why vLLM cannot import a model's module; vLLM's own error omits the reason."""
    from vllm.model_executor.models import registry

    try:
        registry.ModelRegistry.models[name].load_model_cls()
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return "no reason given"
