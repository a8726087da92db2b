"""What an engine must have for biases of logits."""

from __future__ import annotations

from typing import Any

from midstream.errors import SpecError
from midstream.plan import ResolvedPlan


def check_biases(plan: ResolvedPlan, vllm_config: Any) -> None:
    if not plan.biases:
        return
    source = next(edit.source for edit in plan.edits if edit.site == "logits")
    path = f"edits[{source}]" if source >= 0 else f"steering[{source}]"
    if getattr(vllm_config.parallel_config, "enable_batch_sharded_sampling", False):
        raise SpecError(path, "a bias is unsupported with enable_batch_sharded_sampling: remove it")
    vocabulary = int(vllm_config.model_config.get_vocab_size())
    largest = max(max(bias.tokens) for bias in plan.biases)
    if largest >= vocabulary:
        raise SpecError(
            f"{path}.tokens",
            f"there is no token {largest}: the model has {vocabulary}, 0 to {vocabulary - 1}",
        )
