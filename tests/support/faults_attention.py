"""Ways to break attention weights."""

from __future__ import annotations

from support.fault import Fault

_ENGINE = "tests/engine/test_attention.py::"
_LENS = "tests/engine/test_lens.py::"
_BIAS = "tests/engine/test_bias.py::"

ATTENTION = (
    Fault(
        "Attention weights are those of all keys where the layer has a sliding window",
        "runtime/worker/attention/layers.py",
        "        window=int(module.sliding_window or 0),\n",
        "        window=0,\n",
        f"{_ENGINE}test_weights_are_those_of_transformers",
    ),
    Fault(
        "Attention weights are without the layer's soft cap",
        "runtime/worker/attention/layers.py",
        "        soft_cap=float(impl.logits_soft_cap or 0.0),\n",
        "        soft_cap=0.0,\n",
        f"{_ENGINE}test_weights_are_those_of_transformers",
    ),
    Fault(
        "A query attends to another group's keys",
        "runtime/worker/attention/layers.py",
        "torch.arange(module.num_heads, device=device) // per_key",
        "torch.arange(module.num_heads, device=device) % module.num_kv_heads",
        f"{_ENGINE}test_weights_are_those_of_transformers",
    ),
    Fault(
        "A query attends to a key after it",
        "runtime/worker/attention/weights.py",
        "    seen = distance >= 0\n",
        "    seen = distance >= -1\n",
        "tests/unit/runtime/worker/attention/test_reader.py"
        "::test_rows_are_those_of_each_query_by_itself",
    ),
    Fault(
        "The kernel of attention scores takes the window of the tile's last row for all",
        "runtime/worker/attention/scores_kernel.py",
        "(distance < window)",
        "(tl.max(at, 0) - key[None, :] < window)",
        "tests/unit/ops/test_site_triton.py"
        "::test_the_interpreted_kernels_do_what_their_references_do",
    ),
    Fault(
        "The kernel of attention scores reads the first block of a request for all its keys",
        "runtime/worker/attention/scores_kernel.py",
        "table_row + key // size,",
        "table_row + 0 * key,",
        "tests/unit/ops/test_site_triton.py"
        "::test_the_interpreted_kernels_do_what_their_references_do",
    ),
    Fault(
        "A query attends to the keys of another request",
        "runtime/worker/attention/queries.py",
        'side="right")',
        'side="left")',
        f"{_ENGINE}test_requests_with_and_without_attention_run_together",
    ),
    Fault(
        "Attention weights of the wrong heads are returned where ranks have parts of them",
        "runtime/frontend/results/attention.py",
        "    if asked is not None and not pattern.heads:\n",
        "    if asked is not None and pattern.heads:\n",
        "tests/system/test_inner_ranks.py::test_attention_of_every_head_is_that_of_one_rank",
    ),
    Fault(
        "Keys are read where no backend writes them",
        "runtime/worker/attention/key_layout.py",
        "    if numbers.numel() != size * heads * head_dim or numbers.unique().numel() != numbers.numel():\n"
        "        return None\n",
        "",
        "tests/unit/runtime/worker/attention/test_key_layout.py"
        "::test_a_backend_that_stores_something_else_is_refused_by_name",
    ),
    Fault(
        "Queries that go through a norm after `q` are taken for those that attention reads",
        "runtime/worker/attention/layers.py",
        "    if why is not None and why != NO_ROPE.format(plain):\n",
        "    if why is not None and not why.startswith(NO_ROPE.format(plain)):\n",
        "tests/unit/runtime/worker/attention/test_layers.py"
        "::test_layers_whose_attention_cannot_be_computed_again_say_why",
    ),
    Fault(
        "Logits of a request are those of another request's tokens",
        "runtime/worker/attention/logits.py",
        "mine = None if tokens is None else tokens[first:last]",
        "mine = None if tokens is None else tokens[: last - first]",
        f"{_BIAS}test_logits_that_are_asked_for_together_are_each_requests_own",
    ),
    Fault(
        "Chosen logits are returned in another order than their tokens",
        "runtime/frontend/results/attention.py",
        "values[:, chosen.argsort().argsort()]",
        "values[:, chosen.argsort()]",
        f"{_BIAS}test_logits_are_those_of_transformers_at_every_position",
    ),
    Fault(
        "A lens decodes the stream without the final norm",
        "runtime/worker/attention/lens.py",
        "self._head(self._norm.forward(stream))",
        "self._head(stream)",
        f"{_LENS}test_every_layer_is_decoded_as_transformers_decodes_it",
    ),
    Fault(
        "A lens returns each layer's tokens as those of the layer after it",
        "runtime/worker/attention/reader.py",
        "for one, rows in zip(mine, parts, strict=True)}",
        "for one, rows in zip(mine, parts.roll(1, 0), strict=True)}",
        f"{_LENS}test_every_layer_is_decoded_as_transformers_decodes_it",
    ),
    Fault(
        "The rank of a token in a lens counts tokens that are as likely",
        "runtime/worker/attention/logits.py",
        "1 + (logits > chosen",
        "1 + (logits >= chosen",
        f"{_LENS}test_ranks_are_those_of_the_whole_vocabulary",
    ),
    Fault(
        "Logits are returned with the request's biases added",
        "runtime/worker/endpoint.py",
        'head=getattr(model, "compute_logits", None),',
        "head=lambda hidden: model.compute_logits(hidden),",
        f"{_BIAS}test_logits_are_those_of_transformers_at_every_position",
    ),
)
