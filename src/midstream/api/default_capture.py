"""`LLM(layers=…)`: one capture for every request, given back as plain dicts of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from midstream.errors import ConfigError
from midstream.spec import Capture, Layers, Plan, Positions

_SITE = "resid_post"


@dataclass(frozen=True, slots=True)
class DefaultCapture:
    """Which rows every output gets.

    Attributes:
        layers: the layers.
        prefill: positions for `prefill_hidden_states`: "prompt", "last_prompt" or None.
        decode: whether `hidden_states` is filled.
        last_decode: only its last row.
    """

    layers: Layers
    prefill: str | None
    decode: bool
    last_decode: bool

    @staticmethod
    def parse(
        layers: Sequence[int] | Sequence[str] | str,
        include_prefill: bool,
        include_decode: bool,
        last_prefill_token: bool,
        last_decode_token: bool,
    ) -> DefaultCapture:
        """From `LLM`'s arguments.

        Raises:
            SpecError: the layers are malformed.
            ConfigError: nothing is to be captured.
        """
        prefill = "last_prompt" if last_prefill_token else "prompt" if include_prefill else None
        decode = include_decode or last_decode_token
        if prefill is None and not decode:
            raise ConfigError(
                "layers: nothing would be captured; set include_decode, include_prefill or "
                "last_prefill_token"
            )
        return DefaultCapture(Layers.parse(layers), prefill, decode, last_decode_token)

    def join(self, plan: Plan | None, max_tokens: int | None) -> Plan | None:
        """A request's own plan with this capture beside it."""
        positions = [self.prefill] if self.prefill else []
        # With one token to generate there is no generated row, and asking for it would be refused.
        if self.decode and max_tokens != 1:
            positions.append("generated")
        if not positions:
            return plan
        capture = Capture(layers=self.layers, sites=_SITE, positions=Positions.parse(positions))
        if plan is None:
            return Plan(captures=(capture,))
        if capture in plan.captures:
            return plan
        return replace(plan, captures=(*plan.captures, capture))

    def put_on(self, output: Any, num_layers: int) -> None:
        """Sets `hidden_states` and `prefill_hidden_states`, {layer: [rows, hidden]}, on each
        completion, and on the output where it has but one. Layers that only the request's own
        capture asked for are not among them.
        """
        given = self.layers.indices
        layers = None if given == "all" else {int(layer) % num_layers for layer in given}
        for completion in output.outputs:
            completion.hidden_states, completion.prefill_hidden_states = self._split(
                completion, layers
            )
        if len(output.outputs) == 1:
            output.hidden_states = output.outputs[0].hidden_states
            output.prefill_hidden_states = output.outputs[0].prefill_hidden_states

    def _split(
        self, completion: Any, layers: set[int] | None
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        decode: dict[int, Any] = {}
        prefill: dict[int, Any] = {}
        # Not there where `join` had nothing to ask for.
        activations = getattr(completion, "activations", None)
        if activations is None:
            return decode, prefill
        # The output's own prompt_token_ids are None where the prompt was given as embeddings.
        prompt_len = completion.receipt.prompt_tokens
        for layer in activations.layers:
            if (_SITE, layer) not in activations or (layers and layer not in layers):
                continue
            rows = activations[_SITE, layer]
            positions = activations.positions_of(_SITE, layer)
            if self.prefill:
                wanted = positions < prompt_len
                if self.prefill == "last_prompt":
                    wanted = positions == prompt_len - 1
                prefill[layer] = rows[wanted]
            if self.decode:
                generated = rows[positions >= prompt_len]
                decode[layer] = generated[-1:] if self.last_decode else generated
        return decode, prefill
