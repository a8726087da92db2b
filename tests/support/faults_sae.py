"""Faults of reconstructions by SAEs; see `support.faults`."""

from __future__ import annotations

from support.fault import Fault

SAES: tuple[Fault, ...] = (
    Fault(
        "KV of tokens that one SAE reconstructed is served for another of the same name",
        "Reconstruct._code",
        "float(int(code.digest[4 * index : 4 * index + 4], 16))",
        "0.0",
        "tests/engine/test_saelens.py::test_kv_of_reconstructed_tokens_is_shared_by_equal_requests"
        "_alone",
    ),
    Fault(
        "A reconstruction without the error term keeps the activations before the change",
        "reconstruct",
        "code[:, chosen] = changed",
        "",
        "tests/unit/ops/test_sae.py::test_a_reconstruction_is_that_of_the_formulas",
    ),
    Fault(
        "A kernel keeps one activation too many of a TopK SAE",
        "change_kernel",
        "least = tl.where(kept_count >= top_k, middle, least)",
        "least = tl.where(kept_count > top_k, middle, least)",
        "tests/unit/ops/test_site_triton.py::test_the_interpreted_kernels_do_what_their_references"
        "_do",
    ),
    Fault(
        "A named edit reconstructs with what is now in the memory of its SAE",
        "read_saes",
        "if saes.source(inner.sae).reconstructs() != inner.code:",
        "if inner.code is None:",
        "tests/engine/test_saelens.py::test_reconstructions_in_gates_tiers_names_and_several"
        "_completions",
    ),
    Fault(
        "Of two SAEs of one token, the second decodes for both",
        "layout:kind_of",
        "if ops.count(Op.RECONSTRUCT) > 1:",
        "if ops.count(Op.RECONSTRUCT) > 2:",
        "tests/unit/ops/test_sae.py::test_what_may_be_at_one_site",
    ),
)
