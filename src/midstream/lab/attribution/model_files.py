"""`ModelFiles`: the files that an engine loaded its weights from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from midstream.errors import SpecError, UnsupportedError
from midstream.validation import kind

QUANTISED = "the weights of {} are quantised ({}): gradients are computed with plain weights only"
# The formats of files that transformers reads as well; "dummy" weights are random.
_FORMATS = ("auto", "hf", "safetensors", "pt", "fastsafetensors", "runai_streamer")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's folder or name, and how to read it."""

    model: str
    revision: str | None = None  # of the name; None: the default one
    trust_remote_code: bool = False

    @staticmethod
    def of(llm: Any) -> ModelFiles:
        try:
            engine = llm.llm_engine.vllm_config
        except AttributeError:
            raise SpecError("llm", f"expected a midstream.LLM, got {kind(llm)}") from None
        config = engine.model_config
        name = str(config.model)
        if config.quantization is not None:
            raise UnsupportedError(QUANTISED.format(name, config.quantization))
        chosen = engine.load_config.load_format
        if getattr(chosen, "value", chosen) not in _FORMATS:
            raise UnsupportedError(
                f"the weights of {name} were loaded with load_format={chosen!r}; "
                "transformers reads only files of safetensors and PyTorch"
            )
        if config.hf_overrides:
            raise UnsupportedError(
                f"{name} was loaded with hf_overrides, which transformers does not know; save the "
                "changed configuration, and load that folder"
            )
        if config.hf_config_path not in (None, config.model):
            raise UnsupportedError(
                f"{name} was loaded with the configuration in hf_config_path="
                f"{config.hf_config_path!r}; save it in the model's folder, as transformers reads "
                "that one"
            )
        return ModelFiles(name, config.revision, bool(config.trust_remote_code))

    @property
    def arguments(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def load_tokenizer(self) -> Any:
        """Return transformers' tokenizer; None if the model has none."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.model, **self.arguments)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
