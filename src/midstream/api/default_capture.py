"""`LLM(layers=…)` and `AsyncLLM(layers=…)`: one capture for every request, in plain dicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from midstream.errors import ConfigError
from midstream.plan import Capture, Edit, Layers, Plan, Positions, Sites
from midstream.plan.shape import ModelShape
from midstream.plan.tap_lookup import find_taps
from midstream.validation import at

_SITE = "resid_post"


@dataclass(frozen=True, slots=True)
class DefaultCapture:
    """The capture that applies to every request."""

    layers: Layers
    prefill: str | None  # positions for `prefill_hidden_states`: "prompt", "last_prompt" or None
    decode: bool  # fill `hidden_states`
    last_decode: bool  # `hidden_states` has the last row only
    last_token: bool = False  # `hidden_states` has the row of the last token; see `last_token.py`

    @staticmethod
    def parse(
        layers: Sequence[int] | Sequence[str] | str,
        include_prefill: bool,
        include_decode: bool,
        last_prefill_token: bool,
        last_decode_token: bool,
        last_token_row: bool = False,
    ) -> DefaultCapture:
        prefill = "last_prompt" if last_prefill_token else "prompt" if include_prefill else None
        decode = include_decode or last_decode_token
        if prefill is None and not decode:
            raise ConfigError(
                "layers: these settings capture no positions; set include_decode, include_prefill "
                "or last_prefill_token"
            )
        if last_token_row and not decode:
            raise ConfigError("last_token_row: hidden_states has no rows with include_decode=False")
        with at("layers"):
            parsed = Layers.parse(layers)
        return DefaultCapture(parsed, prefill, decode, last_decode_token, last_token_row)

    def check(self, shape: ModelShape) -> None:
        """Check that the layers exist and are tapped."""
        find_taps(self.layers, Sites(_SITE), shape, "layers", "midstream.sites")

    def join(self, plan: Plan | None, max_tokens: int | None, stream: bool = False) -> Plan | None:
        """Return a request's own plan with this capture added; `stream`: outputs show it so far."""
        positions = [self.prefill] if self.prefill else []
        # With one token to generate there is no generated row, and requesting it is an error.
        if self.decode and max_tokens != 1:
            positions.append("generated")
        if not positions:
            return plan
        capture = self._capture(Positions.parse(positions), stream)
        if plan is None:
            return Plan(captures=(capture,))
        if capture in plan.captures:
            return plan
        return replace(plan, captures=(*plan.captures, capture))

    def plan_of_last(self, edits: Sequence[Edit]) -> Plan:
        """Return the plan of a request that computes the row of its prompt's last token."""
        capture = self._capture(Positions("last_prompt"), stream=False)
        return Plan(captures=(capture,), edits=tuple(edits))

    def _capture(self, positions: Positions, stream: bool) -> Capture:
        return Capture(layers=self.layers, sites=Sites(_SITE), positions=positions, stream=stream)

    def attach(self, output: Any, num_layers: int, prompt_len: int = 0) -> None:
        """Set `hidden_states` and `prefill_hidden_states`, {layer: [rows, hidden]}, on completions,
        and on an output of one; `prompt_len`: for an output without a receipt.
        """
        for completion in output.outputs:
            receipt = getattr(completion, "receipt", None)
            length = prompt_len if receipt is None else receipt.prompt_tokens
            decode, prefill = self._split(completion, self._indices(num_layers), length)
            holders = (output, completion) if len(output.outputs) == 1 else (completion,)
            for holder in holders:
                holder.hidden_states = holder.hidden = decode
                holder.prefill_hidden_states = holder.prefill_hidden = prefill

    def add_last(self, completion: Any, activations: Any, num_layers: int) -> None:
        """Add the row of the last token, of a `plan_of_last`, to a completion's `hidden_states`."""
        layers = self._indices(num_layers)
        for layer in activations.layers:
            if layers and layer not in layers:
                continue
            row = activations[_SITE, layer]
            before = completion.hidden_states.get(layer)
            if before is not None and not self.last_decode:
                row = torch.cat([before, row])
            completion.hidden_states[layer] = row

    def _indices(self, num_layers: int) -> set[int] | None:
        """Return the layers counted from 0; None: all of them."""
        indices = self.layers.indices
        return None if indices == "all" else {int(layer) % num_layers for layer in indices}

    def _split(
        self, completion: Any, layers: set[int] | None, prompt_len: int
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        decode: dict[int, Any] = {}
        prefill: dict[int, Any] = {}
        # The attribute is absent if `join` added no capture.
        activations = getattr(completion, "activations", None)
        if activations is None:
            return decode, prefill
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
