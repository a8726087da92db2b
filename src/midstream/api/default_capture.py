"""`LLM(layers=…)`: one capture for every request, returned as plain dicts of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from midstream.errors import ConfigError
from midstream.spec import Capture, Layers, Plan, Positions

_SITE = "resid_post"


@dataclass(frozen=True, slots=True)
class DefaultCapture:
    """The capture that applies to every request.

    Attributes:
        layers: the layers.
        prefill: positions for `prefill_hidden_states`: "prompt", "last_prompt" or None.
        decode: whether to fill `hidden_states`.
        last_decode: whether `hidden_states` has the last row only.
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
        """Create from the arguments of `LLM`.

        Raises:
            SpecError: the layers are malformed.
            ConfigError: the arguments select no positions.
        """
        prefill = "last_prompt" if last_prefill_token else "prompt" if include_prefill else None
        decode = include_decode or last_decode_token
        if prefill is None and not decode:
            raise ConfigError(
                "layers: these settings capture no positions; set include_decode, include_prefill "
                "or last_prefill_token"
            )
        return DefaultCapture(Layers.parse(layers), prefill, decode, last_decode_token)

    def join(self, plan: Plan | None, max_tokens: int | None) -> Plan | None:
        """Return a request's own plan with this capture added."""
        positions = [self.prefill] if self.prefill else []
        # With one token to generate there is no generated row, and requesting it is an error.
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

    def attach(self, output: Any, num_layers: int) -> None:
        """Set `hidden_states` and `prefill_hidden_states`, {layer: [rows, hidden]}, on each
        completion, and on the output if it has only one.

        Layers that only the request's own capture has are excluded.
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
        # The attribute is absent if `join` added no capture.
        activations = getattr(completion, "activations", None)
        if activations is None:
            return decode, prefill
        # The output's prompt_token_ids are None for prompts given as embeddings.
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
