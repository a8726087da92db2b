"""`score` and `tune` of `LLM` and `AsyncLLM`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from midstream.errors import SpecError
from midstream.lab.fit.batches import run_steps, run_steps_async
from midstream.lab.fit.guards import Guard
from midstream.lab.fit.text_scores import TextScore, score_steps
from midstream.lab.fit.tune import Tune, read_tune, tune_steps
from midstream.lab.fit.tune_result import Tuning
from midstream.plan.forms import PhaseLike, PositionsLike


class Evaluations:
    """Methods of `LLM` that run several batches."""

    _front_end: Any

    def score(
        self, texts: Any, prompts: Any = None, *, edits: Any = None, **vllm_args: Any
    ) -> list[TextScore]:
        """Return the log probability of given texts, by the model as it is or with edits.

        One batch, and one log probability per token. The requests do not read the prefix cache.

        Args:
            texts: a list of texts, or of lists of token ids.
            prompts: as many prompts, which the texts follow and which are not scored: texts, token
                ids or chats. A text is tokenized together with its prompt, whose tokens stay what
                they are without it; a space between the two must be in one of them. None: texts
                are scored from their second token on, after the special tokens that the tokenizer
                adds.
            edits: as for `generate`: one value for all texts, or a list with one entry per text.
                All tokens are of the prompt for them, the texts' too.
            **vllm_args: those of `vllm.LLM.score`, which this is for a pooling model.

        Raises:
            SpecError: an argument is malformed.
        """
        if self.model_config.runner_type == "pooling":  # type: ignore[attr-defined]
            outputs: Any = super().score(texts, prompts, **vllm_args)  # type: ignore[misc]
            return list(outputs)
        for name in vllm_args:
            raise SpecError(name, "unknown argument; known: texts, prompts, edits")
        tokenizer: Callable[[], Any] = self.get_tokenizer  # type: ignore[attr-defined]
        with self._front_end.use.whole_call():
            return run_steps(self, score_steps(tokenizer, texts, prompts, edits))

    def tune(
        self,
        directions: Any,
        prompts: Any,
        layers: Any = None,
        scales: Sequence[float] = (0.5, 1.0, 2.0, 4.0),
        guard: Guard | None = None,
        *,
        read_layer: int | None = None,
        effect: Callable[[Any], float] | None = None,
        sampling_params: Any = None,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
    ) -> Tuning:
        """Try every layer and strength of a direction, and measure effect and coherence.

        One batch writes an answer to every prompt for every cell, and the unsteered model's own.
        In a second one the unsteered model reads the prompts with the answers.

        - Effect: the mean of `Direction.probe` over the tokens of an answer, read at one layer for
          all cells: −1 is the negative class mean, 1 the positive one. Then the mean over prompts.
        - Perplexity: of all answers' tokens of a cell to the unsteered model.
        - KL: see `MaxKL`; measured with that guard alone.

        Args:
            directions: `Directions`, or a `Direction`.
            prompts: a list of texts, token ids or chats.
            layers: layers to steer, one at a time; "all": all of the directions; None: the best.
            scales: strengths, in distances between the class means.
            guard: `MaxPerplexity(ratio)` or `MaxKL(nats)`: a cell for which it does not hold cannot
                be the best. None: all hold.
            read_layer: layer whose direction reads the answers; None: the best.
            effect: a function of an output of `generate` that returns a number, in place of what
                is read.
            sampling_params: of the answers; None: temperature 0 and 32 tokens.
            positions, phase: where the direction is added; see `Steer`.

        Raises:
            SpecError: an argument is malformed, or the engine lacks a tap.
        """
        asked = Tune(
            directions, prompts, layers, scales, guard, read_layer, effect, sampling_params,
            {"positions": positions, "phase": phase},
        )  # fmt: skip
        request = read_tune(self, asked)
        with self._front_end.use.whole_call():
            return run_steps(self, tune_steps(request))


class AsyncEvaluations:
    """The same of `AsyncLLM`; the requests of a batch run concurrently."""

    async def score(self, texts: Any, prompts: Any = None, *, edits: Any = None) -> list[TextScore]:
        """Return the log probability of given texts; see `LLM.score`."""
        tokenizer: Callable[[], Any] = self.get_tokenizer  # type: ignore[attr-defined]
        return await run_steps_async(self, score_steps(tokenizer, texts, prompts, edits))

    async def tune(
        self,
        directions: Any,
        prompts: Any,
        layers: Any = None,
        scales: Sequence[float] = (0.5, 1.0, 2.0, 4.0),
        guard: Guard | None = None,
        *,
        read_layer: int | None = None,
        effect: Callable[[Any], float] | None = None,
        sampling_params: Any = None,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
    ) -> Tuning:
        """Try every layer and strength of a direction; see `LLM.tune`."""
        await self.ready()  # type: ignore[attr-defined]
        asked = Tune(
            directions, prompts, layers, scales, guard, read_layer, effect, sampling_params,
            {"positions": positions, "phase": phase},
        )  # fmt: skip
        request = read_tune(self, asked)
        return await run_steps_async(self, tune_steps(request))
