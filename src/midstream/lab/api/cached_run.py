"""`run_with_cache` of `LLM` and `AsyncLLM`: TransformerLens's form of a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, overload

from midstream.api.arguments import EditArgument
from midstream.errors import SpecError
from midstream.plan.readouts import Capture, Logits
from midstream.plan.shape import ModelShape
from midstream.results.transformer_lens_cache import TransformerLensCache
from midstream.sites import NAMES, HookName, transformer_lens_name
from midstream.validation import kind

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import SamplingParams

NamesFilter = str | Sequence[str] | Callable[[str], bool] | None
ReturnType = Literal["logits"] | None


class CachedRuns:
    """`run_with_cache` of an `LLM`."""

    @overload
    def run_with_cache(
        self,
        prompt: Any,
        names_filter: NamesFilter = ...,
        *,
        return_type: Literal["logits"] = ...,
        edits: EditArgument = ...,
    ) -> tuple[Tensor, TransformerLensCache]: ...
    @overload
    def run_with_cache(
        self,
        prompt: Any,
        names_filter: NamesFilter = ...,
        *,
        return_type: None,
        edits: EditArgument = ...,
    ) -> tuple[None, TransformerLensCache]: ...
    def run_with_cache(
        self,
        prompt: Any,
        names_filter: NamesFilter = None,
        *,
        return_type: ReturnType = "logits",
        edits: EditArgument = None,
    ) -> tuple[Tensor | None, TransformerLensCache]:
        """Compute one prompt, and return its logits and its activations, as TransformerLens does.

        Args:
            prompt: a text, token ids, or any prompt of vLLM; not several.
            names_filter: what is cached: a name, such as "blocks.10.hook_resid_post", a list of
                names, or a function of TransformerLens's names that returns whether it is. None:
                every tapped site of every layer.
            return_type: None: no logits are computed.
            edits: as for `generate`.

        Returns:
            The logits, float32 [1, positions, vocabulary], or None; and the cache, whose values are
            [1, positions, hidden]. `generate(prompts, capture=…)` takes several prompts, and
            returns rows without this dimension.

        Raises:
            SpecError: an argument is malformed, or nothing of that name is tapped.
        """
        llm: Any = self
        captures = _captures_of(names_filter, return_type, llm.info.shape)
        prompts = [_one(prompt)]
        with _named():
            (output,) = llm.generate(
                prompts, one_token(), capture=[captures], edits=edits, use_tqdm=False
            )
        return _logits_and_cache(output, return_type)


class AsyncCachedRuns:
    """`run_with_cache` of an `AsyncLLM`."""

    @overload
    async def run_with_cache(
        self,
        prompt: Any,
        names_filter: NamesFilter = ...,
        *,
        return_type: Literal["logits"] = ...,
        edits: EditArgument = ...,
    ) -> tuple[Tensor, TransformerLensCache]: ...
    @overload
    async def run_with_cache(
        self,
        prompt: Any,
        names_filter: NamesFilter = ...,
        *,
        return_type: None,
        edits: EditArgument = ...,
    ) -> tuple[None, TransformerLensCache]: ...
    async def run_with_cache(
        self,
        prompt: Any,
        names_filter: NamesFilter = None,
        *,
        return_type: ReturnType = "logits",
        edits: EditArgument = None,
    ) -> tuple[Tensor | None, TransformerLensCache]:
        """Compute one prompt, and return its logits and its activations; see
        `LLM.run_with_cache`.
        """
        llm: Any = self
        await llm.ready()
        captures = _captures_of(names_filter, return_type, llm.info.shape)
        outputs = llm.generate(_one(prompt), one_token(), capture=captures, edits=edits)
        with _named():
            last = [output async for output in outputs][-1]
        return _logits_and_cache(last, return_type)


def _captures_of(
    names_filter: NamesFilter, return_type: ReturnType, shape: ModelShape
) -> list[Capture | Logits]:
    if return_type not in (None, "logits"):
        raise SpecError("return_type", f'expected "logits" or None, got {return_type!r:.60}')
    captures: list[Capture | Logits] = []
    if return_type == "logits":
        captures.append(Logits(tokens="all", positions="prompt"))
    if names_filter is None:
        tapped = [site for site in NAMES if shape.tapped_layers(site)]
        return [*captures, Capture("all", [HookName(site) for site in tapped], "prompt")]
    if callable(names_filter):
        taps = [tap for tap in shape.taps if names_filter(transformer_lens_name(tap))]
        if not taps:
            raise SpecError("names_filter", "the function chooses none of the tapped names")
        layers_of: dict[str, list[int]] = {}
        for site, layer in sorted(taps):
            layers_of.setdefault(site, []).append(layer)
        for site, layers in layers_of.items():
            captures.append(Capture(layers, HookName(site), "prompt"))
        return captures
    if not isinstance(names_filter, (str, list, tuple)):
        raise SpecError(
            "names_filter",
            f"expected a name, a list of names, or a function of names, got {kind(names_filter)}",
        )
    names = [names_filter] if isinstance(names_filter, str) else names_filter
    try:
        return [*captures, *(Capture(sites=HookName(name), positions="prompt") for name in names)]
    except SpecError as error:
        raise SpecError("names_filter", error.problem) from None


@contextmanager
def _named() -> Iterator[None]:
    """Raise errors of the captures as errors of `names_filter`."""
    try:
        yield
    except SpecError as error:
        if not error.path.startswith("capture"):
            raise
        raise SpecError("names_filter", error.problem) from None


def _one(prompt: Any) -> Any:
    from midstream.runtime.frontend.request.prompt.inputs import list_prompts

    prompts = list_prompts(prompt)
    if len(prompts) != 1:
        raise SpecError(
            "prompt",
            f"expected one, got {len(prompts)}; use generate(prompts, capture=True)",
        )
    return prompts[0]


def one_token() -> SamplingParams:
    """Return the sampling parameters of a request for its prompt alone."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1, temperature=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def _logits_and_cache(
    output: Any, return_type: ReturnType
) -> tuple[Tensor | None, TransformerLensCache]:
    logits = None if return_type is None else output.logits.values[None]
    return logits, TransformerLensCache(output.activations)
