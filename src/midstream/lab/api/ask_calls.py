"""`ask` of `LLM` and of `AsyncLLM`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from midstream.deadlines import all_of
from midstream.errors import SpecError
from midstream.lab.api.ask import (
    ADD,
    INTO,
    MATCH,
    MOST_TOKENS,
    PLACEHOLDER,
    TEMPLATE,
    AskRequest,
    naming_arguments,
)
from midstream.plan.captured_rows import CapturedRows, not_here
from midstream.plan.forms import IndicesLike
from midstream.runtime.frontend.request.prompt.message_spans import TEMPLATE_ARGUMENTS
from midstream.runtime.frontend.request.prompt.tokenized import tokenize
from midstream.sites import SiteName
from midstream.validation import at

if TYPE_CHECKING:
    from vllm import SamplingParams

    from midstream.api.outputs import GenerateOutput, StreamedOutput

_FIELDS = {field.name for field in dataclasses.fields(AskRequest)}


class OfflineQuestions:
    """Questions of an `LLM` about captured rows."""

    def ask(
        self,
        sources: Any,
        question: str | list[str],
        layer: int,
        *,
        site: SiteName = "resid_post",
        positions: IndicesLike | None = None,
        into: int = INTO,
        mode: Literal["add", "replace"] = ADD,
        norm: Literal["match"] | None = MATCH,
        template: str = TEMPLATE,
        placeholder: str = PLACEHOLDER,
        sampling_params: SamplingParams | None = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        **chat: Any,
    ) -> list[GenerateOutput]:
        """Ask the model a question about activations: rows of one request are placed at the
        placeholder tokens of another, in the residual stream, and the model answers.

        With an adapter that was trained for this, activation oracles: Karvonen et al. 2025
        (arXiv:2512.15674), whose prompt, layer and operation are the defaults; and LatentQA: Pan et
        al. 2024 (arXiv:2412.08686). With the model itself, Patchscopes: Ghandeharioun et al. 2024
        (arXiv:2401.06102); SelfIE: Chen et al. 2024 (arXiv:2403.10949). All questions are one
        batch. The prefix cache serves what comes before the placeholders, and tokens with the same
        rows.

        Args:
            sources: what the rows are from: an output of `generate` that captured them, one of its
                `outputs`, `Activations`, or rows [rows, width]; or a list of these. With
                `Capture(reduce="device")` no row is sent to the host and back.
            question: a text, or a list; one is for all sources, and one source for all questions.
            layer: the layer that the rows are from, counted from 0. The prompt names it.
            site: the site that they are from.
            positions: positions of the source whose rows are used, counted from 0, in this order.
                None: all that were captured.
            into: the layer after which they are placed, at `resid_post`.
            mode: "add": h ← h + ‖h‖ · v/‖v‖ for a row v. "replace": h ← ‖h‖ · v/‖v‖.
            norm: None: without the norms, h ← h + v or h ← v.
            template: the user's message; `{rows}` becomes a placeholder for each row.
            placeholder: a text that is one token of the model. The message must not have as many
                of them in a row elsewhere.
            sampling_params: of the answers; None: temperature 0 and 64 tokens.
            use_tqdm, lora_request: as in `vllm.LLM.generate`.
            **chat: arguments of the chat template, as in `vllm.LLM.chat`.

        Returns:
            One output per question, as `generate` returns them, with a `receipt`.

        Raises:
            SpecError: an argument is malformed; there are no such rows, or they have another width
                than the model; the placeholders are not one token each.
            ReceiptError: results differ from their plan.
        """
        llm: Any = self
        request = AskRequest(
            sources, question, layer, site, positions, into, mode, norm, template, placeholder
        )
        # vLLM's default is the template that the engine was created with.
        chat = {"chat_template": getattr(llm, "chat_template", None), **chat}
        prompts, edits = _batch(llm.llm_engine, request, chat)
        with naming_arguments():
            outputs: list[GenerateOutput] = llm.generate(
                prompts,
                _greedy() if sampling_params is None else sampling_params,
                edits=edits,
                use_tqdm=use_tqdm,
                lora_request=lora_request,
            )
        return outputs


class AsyncQuestions:
    """Questions of an `AsyncLLM` about captured rows."""

    async def ask(
        self,
        sources: Any,
        question: str | list[str],
        layer: int,
        *,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        priority: int = 0,
        chat: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> list[StreamedOutput]:
        """Ask the model questions about activations; they run concurrently.

        Args:
            sources, question, layer, sampling_params, lora_request: as for `LLM.ask`.
            priority: as in vLLM's `generate`.
            chat: arguments of the chat template.
            **fields: other arguments of `LLM.ask`.

        Raises:
            SpecError: an argument is malformed, or there are no such rows.
            ReceiptError: results differ from their plan.
        """
        llm: Any = self
        await llm.ready()
        for name in fields:
            if name not in _FIELDS:
                raise SpecError(name, "ask() has no such argument")
        request = AskRequest(sources, question, layer, **fields)
        prompts, edits = _batch(llm, request, chat or {})
        params = _greedy() if sampling_params is None else sampling_params

        async def answer(prompt: Any, edit: Any) -> StreamedOutput:
            vllm_args = {"lora_request": lora_request, "priority": priority}
            with naming_arguments():
                outputs = llm.generate(prompt, params, edits=edit, **vllm_args)
                answers: list[StreamedOutput] = [output async for output in outputs]
            return answers[-1]

        return await all_of(map(answer, prompts, edits))


def _batch(
    engine: Any, request: AskRequest, template: Mapping[str, Any]
) -> tuple[list[Any], list[list[Any]]]:
    """Return the prompts of the questions as tokens, and the edits of each."""
    for name in template:
        if name not in TEMPLATE_ARGUMENTS:
            raise SpecError(name, "ask() has no such argument")
    prompts, edits = [], []
    for rows, question in request.pairs():
        if isinstance(rows, CapturedRows):
            raise not_here().under("sources")
        messages = [{"role": "user", "content": request.content(len(rows), question)}]
        with at("question"):
            prompt = tokenize(engine, messages, template)
        prompts.append({"prompt_token_ids": list(prompt.token_ids or ())})
        edits.append([request.edit(rows, request.locate(prompt, len(rows)))])
    return prompts, edits


def _greedy() -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0, max_tokens=MOST_TOKENS, output_kind=RequestOutputKind.FINAL_ONLY
    )
