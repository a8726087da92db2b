"""What the tests of other projects ask about sites inside layers, and what shows it here.

Counted are test functions by what they mean to show, after reading them; none of their code is
here. Files of which only the number is known are in `UNREAD`.
"""

# ruff: noqa: E501

from __future__ import annotations

from typing import NamedTuple

_INNER = "tests/engine/test_inner_sites.py::"
_READS = _INNER + "rows_of_inner_sites_are_what_the_modules_of_transformers_read_and_return"
_EXPERTS = _INNER + "experts_are_forced_in_and_out_by_their_logits_for_some_tokens_of_some_requests"
_EVERY = (
    _INNER + "every_operation_at_inner_sites_and_heads_does_what_its_formula_says_in_a_mixed_batch"
)
_REFUSED = _INNER + "inner_sites_that_a_model_lacks_are_refused_by_name_and_reason"
_HEADS = "tests/engine/test_captured_heads.py::rows_are_those_of_each_head"

# What cannot be said, by what is lacking.
LACKING = {
    "norms": "queries and keys between their norm and the rotary embedding",
    "weights": "parameters inside layers at the client",
    "spread": "edits by a statistic of the token's own vector, or by chance",
    "backend": "sites inside attention of models that run on the Transformers backend",
}


class Asked(NamedTuple):
    """Tests of one file that mean to show one thing.

    Attributes:
        file: project and file.
        count: number of test functions.
        what: what they mean to show.
        shown: the test that shows it here, or `lacking: ` and a key of `LACKING`, or `nothing`:
            they are about the other project's own parts.
    """

    file: str
    count: int
    what: str
    shown: str


_MLP = "interp-engine test_mlp_internals"
_QKV = "interp-engine test_qkv_layout"
_NORM = "interp-engine test_qk_norm"
_WO = "interp-engine test_head_contributions"
_GQA = "interp-engine test_attn_z_gqa"
_MOE = "EasySteer tests/moe/test_moe"

ROWS: tuple[Asked, ...] = (
    Asked(_MLP, 9, "its resolver tells gated, plain, fused and sparse MLPs apart by attribute names", "nothing"),
    Asked(_MLP, 3, "the activation of the gate times the other half is what the last matrix reads; swapped it is not", _READS),
    Asked(_MLP, 2, "the last matrix of the neurons is the MLP's output, in plain, gated and sandwiched layers", _READS),
    Asked(_MLP, 1, "halves of one merged matrix are cut where the model cuts them", _READS),
    Asked(_MLP, 2, "rows of a model that flattens its tokens are those of their tokens", _READS),
    Asked(_MLP, 3, "a half that the model lacks, experts, and a merged matrix of an unknown form are refused", _REFUSED),
    Asked(_QKV, 5, "its table of layouts, by architecture and engine", "nothing"),
    Asked(_QKV, 4, "values are the model's own, per head, of merged and separate matrices", _HEADS),
    Asked(_QKV, 2, "parallel attention and MLP are told from sequential ones", "tests/engine/test_doctor.py::a_small_copy_says_what_its_layers_lack"),
    Asked(_QKV, 2, "values of GPT-NeoX, and of further families with merged matrices", "lacking: backend"),
    Asked(_NORM, 13, "its detection of norms of queries and keys, and their weights", "nothing"),
    Asked(_NORM, 4, "its reordering of head-major tensors", "nothing"),
    Asked(_NORM, 12, "queries and keys behind their norm, against those in front of it", "lacking: norms"),
    Asked(_WO, 5, "what each head adds to the stream", "lacking: weights"),
    Asked(_GQA, 1, "z is as wide as all heads, not as the stream", _HEADS),
    Asked(_MOE, 2, "experts are forced in and out of every token's choice", _EXPERTS),
    Asked(_MOE, 1, "only at the positions that were named", _EXPERTS),
    Asked(_MOE, 3, "requests of one batch each have their own, and one without has none", _EXPERTS),
    Asked(_MOE, 1, "nothing is left after the last of them has ended", _EXPERTS),
    Asked(_MOE, 2, "logits are raised by their own spread, or of experts by chance", "lacking: spread"),
)  # fmt: skip
# (project and files, number of test functions, what they are about)
UNREAD: tuple[tuple[str, int, str], ...] = (
    ("vllm-lens, branch with queries and keys", 31, "queries, keys, patterns made of them"),
    ("interp-engine test_moe", 40, "logits of the router; experts chosen, their weights"),
    ("interp-engine, scores, probabilities and windows of attention", 27, "patterns"),
    ("EasySteer tests/moe, other files", 13, "the same in other modes and models"),
)


def counts() -> dict[str, int]:
    """Return the number of test functions that pass here, cannot be said, and mean nothing."""
    found = {"pass": 0, "lacking": 0, "nothing": 0}
    for row in ROWS:
        kind = row.shown.partition(":")[0]
        found[kind if kind in found else "pass"] += row.count
    return found
