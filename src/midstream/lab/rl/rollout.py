"""Completions sampled for a trainer, with the probes and rows that its rewards read."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from midstream.errors import SpecError, UnsupportedError
from midstream.lab.client import Client
from midstream.plan import Probe

# Fields of the completions, which trainers hand to reward functions by name.
SCORES, ROWS, VERSION = "probe_scores", "activations", "weight_version"


class Sampled(NamedTuple):
    """One completion."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]  # of each token, as it was sampled
    scores: dict[str, list[Any]]
    rows: Any  # `Activations`; None: nothing was captured
    version: int  # of the weights


class _Weights(NamedTuple):
    """Which weights a trainer has."""

    model: weakref.ref[Any]
    run: weakref.ref[Any]
    step: int
    written: list[tuple[int, int]]  # of each parameter its place, and how often torch wrote it


class Rollout:
    """The `rollout_func` of TRL's `GRPOTrainer`: a completion for each prompt, sampled by an engine
    of midstream's. Reward functions get, as fields of their completions, `probe_scores` by name of
    the probe, `activations` with `capture`, and `weight_version`, the number of the weights.
    """

    def __init__(
        self, engine: Any = None, *, capture: Any = None, sampling: Mapping[str, Any] | None = None
    ) -> None:
        """Create it.

        Args:
            engine: see `probe_reward`. The trainer's weights are loaded into an engine of this
                process whenever they have changed; other engines TRL updates.
            capture: rows for rewards, as for `LLM.generate`; None: none.
            sampling: more sampling parameters than the trainer's own, or in their place.
        """
        self._engine, self._capture = engine, capture
        self._sampling = dict(sampling or {})
        self._probes: dict[str, Probe] = {}
        self._loaded: _Weights | None = None  # those that the engine has

    def add(self, probe: Probe) -> None:
        """Read a probe from now on.

        Raises:
            SpecError: another probe has its name.
        """
        if self._probes.setdefault(probe.name, probe) != probe:
            raise SpecError("name", f"another probe is called {probe.name}; give it another name")

    @property
    def _reads(self) -> dict[str, Any]:
        reads: dict[str, Any] = {"probes": [*self._probes.values()], "capture": self._capture}
        return {name: value for name, value in reads.items() if value}

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Sample one completion for each prompt, texts or conversations, as TRL's trainer asks.

        Raises:
            ReceiptError: scores or rows are not those that were asked for.
            UnsupportedError: the engine cannot get the trainer's weights.
        """
        prompt_ids = [token_ids(prompt, trainer.processing_class) for prompt in prompts]
        settings = {**sampling_of(trainer.args), **self._sampling}
        engine = self._engine
        if isinstance(engine, Client):
            sampled = self._served(engine, prompt_ids, settings)
        else:
            if engine is None:
                engine = trainer.vllm_generation.llm  # which TRL has updated
            elif self._loaded != (loaded := _weights_of(trainer)):
                self._loaded = None  # what a call that fails has loaded is unknown
                load_weights(engine, trainer.accelerator.unwrap_model(trainer.model))
                self._loaded = loaded
            sampled = self._sample(engine, prompt_ids, settings)
        fields: dict[str, Any] = {
            "prompt_ids": [completion.prompt for completion in sampled],
            "completion_ids": [completion.tokens for completion in sampled],
            "logprobs": [completion.logprobs for completion in sampled],
            SCORES: [completion.scores for completion in sampled],
            VERSION: [completion.version for completion in sampled],
        }
        if self._capture is not None:
            fields[ROWS] = [completion.rows for completion in sampled]
        return fields

    def _sample(
        self, engine: Any, prompts: Sequence[list[int]], settings: Mapping[str, Any]
    ) -> list[Sampled]:
        from midstream.api.sampling_params import SamplingParams

        params = SamplingParams(**settings, logprobs=0, **self._reads)
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = engine.generate(requests, params, use_tqdm=False)
        return [_sampled(ids, output) for ids, output in zip(prompts, outputs, strict=True)]

    def _served(
        self, client: Client, prompts: Sequence[list[int]], settings: Mapping[str, Any]
    ) -> list[Sampled]:
        options = {**settings, "logprobs": 0, "return_token_ids": True, **self._reads}
        output = client.complete([*prompts], **options)
        choices = sorted(output.raw["choices"], key=lambda choice: int(choice["index"]))
        sampled = []
        for prompt, choice, completion in zip(prompts, choices, output.outputs, strict=True):
            assert completion.receipt is not None
            completion.receipt.check()
            sampled.append(
                Sampled(
                    prompt,
                    list(choice["token_ids"]),
                    list(choice["logprobs"]["token_logprobs"]),
                    _scores(completion.probes),
                    completion.activations,
                    completion.receipt.weight_version.number,
                )
            )
        return sampled


def _weights_of(trainer: Any) -> _Weights:
    # Weights change within a step too: at its end, a run may load its best ones.
    written = [(at.data_ptr(), at._version) for at in trainer.model.parameters()]
    # Each run has a state of its own, and counts its steps from 0.
    run = weakref.ref(trainer.model), weakref.ref(trainer.state), trainer.state.global_step
    return _Weights(*run, written)


def _sampled(prompt: list[int], output: Any) -> Sampled:
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    chosen = zip(completion.logprobs, tokens, strict=True)
    return Sampled(
        prompt,
        tokens,
        [float(by_token[token].logprob) for by_token, token in chosen],
        _scores(getattr(completion, "probes", None)),
        getattr(completion, "activations", None),
        completion.receipt.weight_version.number,
    )


def _scores(probes: Any) -> dict[str, list[Any]]:
    return {} if probes is None else {name: scores.tolist() for name, scores in probes.items()}


def token_ids(prompt: Any, tokenizer: Any) -> list[int]:
    """Return the ids of a prompt: a text as it is, or a conversation by the chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    whole = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(whole["input_ids"])


def sampling_of(args: Any) -> dict[str, Any]:
    """Return the sampling parameters of a `GRPOConfig`."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    known = {name: getattr(args, name, None) for name in names}
    settings = {name: value for name, value in known.items() if value is not None}
    return {**settings, "max_tokens": args.max_completion_length}


def load_weights(engine: Any, model: Any) -> None:
    """Load a model's weights into an engine of this process, in place; it gets the next version.

    Raises:
        UnsupportedError: the engine is in another process, or the model has adapters.
    """
    if not hasattr(engine.llm_engine.engine_core, "engine_core"):
        raise UnsupportedError(
            "an engine in another process cannot read the trainer's weights: start it with "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0, or let TRL update one, by use_vllm=True and engine "
            'None or vllm_mode="server" and a Client'
        )
    if getattr(model, "peft_config", None) is not None:
        raise UnsupportedError(
            "the model has adapters; TRL merges them for an engine of its own: use_vllm=True and "
            "engine None"
        )
    weights = [(name, value.detach()) for name, value in model.named_parameters()]
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
