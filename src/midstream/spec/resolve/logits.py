"""Resolution of a `Logits` against a model and a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from midstream.errors import SpecError
from midstream.spec.logits import Logits
from midstream.spec.positions.position_set import Where
from midstream.spec.resolve.resolved import Pattern, ResolvedCapture, ResolvedPlan
from midstream.spec.shape import ModelShape
from midstream.spec.tokens import known_ids

LOGITS = "logits"
# What a model lacks whose head does not read the output of its final norm.
HEAD = "head"


def resolve_logits(logits: Logits, source: int, where: Where, shape: ModelShape) -> ResolvedCapture:
    """Resolve a `Logits`. The size of rows of the whole vocabulary is 0 until `with_vocabulary`.

    Args:
        source: its index in the plan.
    """
    read = "final_norm", shape.num_layers - 1
    why = shape.reason((HEAD, shape.num_layers - 1))
    if why is not None:
        raise SpecError("", f"logits cannot be read: {why}")
    if read not in shape.taps:
        why = shape.reason(read) or (
            'the engine does not tap final_norm; add "final_norm" to midstream\'s setting `sites`, '
            'as in LLM(…, midstream={"sites": ["resid_post", "final_norm"]})'
        )
        raise SpecError("", f"logits cannot be read: {why}")
    pattern = Pattern("logits_all", 0, (), (), (read,), (1,))
    if logits.top:
        pattern = replace(pattern, kind="logits_top", size=2 * logits.top + 1)
    elif not isinstance(logits.tokens, str):
        # In the given order, unlike other ranges.
        tokens = tuple((token, token + 1) for token in known_ids(logits.tokens))
        pattern = replace(pattern, kind="logits_of", size=len(tokens) + 1, keys=tokens)
    return ResolvedCapture(((LOGITS, read[1]),), where, source, pattern)


def check_logits(captures: Sequence[ResolvedCapture]) -> None:
    """Check that at most one capture returns logits."""
    sources = [capture.source for capture in captures if capture.taps[0][0] == LOGITS]
    if len(sources) > 1:
        raise SpecError(
            f"capture[{sources[1]}]",
            f"capture[{sources[0]}] returns logits too; ask for one kind of logits in a request",
        )


def with_vocabulary(plan: ResolvedPlan, vllm_config: Any) -> ResolvedPlan:
    """Return a plan whose logits the engine can return, with the sizes of their rows."""
    places = [index for index, capture in enumerate(plan.captures) if capture.taps[0][0] == LOGITS]
    if not places:
        return plan
    (place,) = places
    capture = plan.captures[place]
    path = f"capture[{capture.source}]"
    vocabulary = int(vllm_config.model_config.get_vocab_size())
    pattern = capture.pattern
    assert pattern is not None
    for token_index, (token, _) in enumerate(pattern.keys):
        if token >= vocabulary:
            raise SpecError(
                f"{path}.tokens[{token_index}]",
                f"there is no token {token}: the model has {vocabulary}, 0 to {vocabulary - 1}",
            )
    if pattern.kind == "logits_top" and pattern.size > 2 * vocabulary + 1:
        raise SpecError(f"{path}.top", f"the model has {vocabulary} tokens")
    if pattern.kind == "logits_all":
        pattern = replace(pattern, size=vocabulary + 1)
    captures = list(plan.captures)
    captures[place] = replace(capture, pattern=pattern)
    return replace(plan, captures=tuple(captures))
