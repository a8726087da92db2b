"""What the tests of other projects ask about sites inside layers, and what shows it here.

Counted are test functions by what they mean to show, after reading them; none of their code is
here. Two neighbouring files were not read: interp-engine's table of config fields, and vllm-lens's
example of induction circuits.
"""

# ruff: noqa: E501

from typing import NamedTuple

# What cannot be said, by what is lacking.
LACKING = {
    "norms": "queries and keys between their norm and the rotary embedding",
    "weights": "parameters inside layers at the client",
    "spread": "edits by a statistic of the token's own vector, or by chance",
    "backend": "sites inside attention of models that run on the Transformers backend",
    "chosen": "chosen experts and their weights as results: clients compute them from the router's logits",
    "beside": "neurons, and what the MLP reads, where an MLP runs beside experts (Gemma 4's mixture)",
    "exempt": "a request without the edits that all requests have",
}


class Asked(NamedTuple):
    """Tests of one file that mean to show one thing."""

    file: str  # project and file
    count: int  # number of test functions
    what: str  # what they mean to show
    # The test that shows it here, or `lacking: ` and a key of `LACKING`, or `nothing`: they are
    # about the other project's own parts.
    shown: str


ROWS: tuple[Asked, ...] = (
    Asked("interp-engine test_mlp_internals", 9, "its resolver tells gated, plain, fused and sparse MLPs apart by attribute names", "nothing"),
    Asked("interp-engine test_mlp_internals", 3, "the activation of the gate times the other half is what the last matrix reads; swapped it is not", "tests/engine/test_inner_sites.py::rows_of_inner_sites_are_what_the_modules_of_transformers_read_and_return"),
    Asked("interp-engine test_mlp_internals", 2, "the last matrix of the neurons is the MLP's output, in plain, gated and sandwiched layers", "tests/engine/test_inner_sites.py::rows_of_inner_sites_are_what_the_modules_of_transformers_read_and_return"),
    Asked("interp-engine test_mlp_internals", 1, "halves of one merged matrix are cut where the model cuts them", "tests/engine/test_inner_sites.py::rows_of_inner_sites_are_what_the_modules_of_transformers_read_and_return"),
    Asked("interp-engine test_mlp_internals", 2, "rows of a model that flattens its tokens are those of their tokens", "tests/engine/test_inner_sites.py::rows_of_inner_sites_are_what_the_modules_of_transformers_read_and_return"),
    Asked("interp-engine test_mlp_internals", 3, "a half that the model lacks, experts, and a merged matrix of an unknown form are refused", "tests/engine/test_inner_sites.py::inner_sites_that_a_model_lacks_are_refused_by_name_and_reason"),
    Asked("interp-engine test_qkv_layout", 5, "its table of layouts, by architecture and engine", "nothing"),
    Asked("interp-engine test_qkv_layout", 4, "values are the model's own, per head, of merged and separate matrices", "tests/engine/test_captured_heads.py::rows_are_those_of_each_head"),
    Asked("interp-engine test_qkv_layout", 2, "parallel attention and MLP are told from sequential ones", "tests/engine/test_doctor.py::a_small_copy_says_what_its_layers_lack"),
    Asked("interp-engine test_qkv_layout", 2, "values of GPT-NeoX, and of further families with merged matrices", "lacking: backend"),
    Asked("interp-engine test_qk_norm", 13, "its detection of norms of queries and keys, and their weights", "nothing"),
    Asked("interp-engine test_qk_norm", 4, "its reordering of head-major tensors", "nothing"),
    Asked("interp-engine test_qk_norm", 12, "queries and keys behind their norm, against those in front of it", "lacking: norms"),
    Asked("interp-engine test_head_contributions", 5, "what each head adds to the stream", "lacking: weights"),
    Asked("interp-engine test_attn_z_gqa", 1, "z is as wide as all heads, not as the stream", "tests/engine/test_captured_heads.py::rows_are_those_of_each_head"),
    Asked("EasySteer tests/moe/test_moe", 2, "experts are forced in and out of every token's choice", "tests/engine/test_inner_sites.py::experts_are_forced_in_and_out_by_their_logits_for_some_tokens_of_some_requests"),
    Asked("EasySteer tests/moe/test_moe", 1, "only at the positions that were named", "tests/engine/test_inner_sites.py::experts_are_forced_in_and_out_by_their_logits_for_some_tokens_of_some_requests"),
    Asked("EasySteer tests/moe/test_moe", 3, "requests of one batch each have their own, and one without has none", "tests/engine/test_inner_sites.py::experts_are_forced_in_and_out_by_their_logits_for_some_tokens_of_some_requests"),
    Asked("EasySteer tests/moe/test_moe", 1, "nothing is left after the last of them has ended", "tests/engine/test_inner_sites.py::experts_are_forced_in_and_out_by_their_logits_for_some_tokens_of_some_requests"),
    Asked("EasySteer tests/moe/test_moe", 2, "logits are raised by their own spread, or of experts by chance", "lacking: spread"),
    Asked("interp-engine test_moe", 10, "its reading of configs: number of experts, which layers are sparse", "nothing"),
    Asked("interp-engine test_moe", 2, "the output of a sparse MLP is the whole block's hidden state, not the router's scores or some experts", "tests/engine/test_parity.py::every_site_of_every_layer_reads_and_edits_as_hooks_in_transformers"),
    Asked("interp-engine test_moe", 7, "its search for the router by attribute names, in the MLP and beside it", "nothing"),
    Asked("interp-engine test_moe", 10, "its addresses of logits, weights and ids in the tuples of routers and replaced forwards", "nothing"),
    Asked("interp-engine test_moe", 7, "ids and weights of the chosen experts come with the logits, per token and layer, also over all experts", "lacking: chosen"),
    Asked("interp-engine test_moe", 10, "guards of its tables and of its rebuilding of the choice behind a fused kernel", "nothing"),
    Asked("interp-engine test_moe", 2, "a layer without experts has no router and the refusal says so", "tests/engine/test_inner_sites.py::inner_sites_that_a_model_lacks_are_refused_by_name_and_reason"),
    Asked("interp-engine test_moe", 2, "the MLP's output beside experts is the layer's whole contribution, or refused", "tests/engine/test_sites.py::the_sites_are_different_places_and_add_up"),
    Asked("interp-engine test_moe", 1, "an MLP beside experts still has its input and neurons", "lacking: beside"),
    Asked("interp-engine test_moe", 2, "its address of Gemma 4's normed values, with and without their own matrix", "nothing"),
    Asked("interp-engine test_attn_scores", 6, "scores before the softmax, scaled, masked, per query head, whose softmax is the weights", "tests/engine/test_attention.py::weights_are_those_of_transformers"),
    Asked("interp-engine test_attn_scores", 3, "its swap of transformers' attention function is undone and keeps the mask", "nothing"),
    Asked("interp-engine test_attn_scores", 1, "reading attention leaves the forward pass as it was", "tests/engine/test_attention.py::vectors_beside_attention_stay_what_they_are"),
    Asked("interp-engine test_attn_scores", 1, "it needs transformers' eager attention and refuses another", "nothing"),
    Asked("interp-engine test_attn_scores", 1, "layers of linear attention are refused by name", "tests/unit/runtime/worker/readouts/test_layers.py::layers_whose_attention_cannot_be_computed_again_say_why"),
    Asked("interp-engine test_attn_probs_indexing", 1, "how many patterns transformers returns of a hybrid model", "nothing"),
    Asked("interp-engine test_attn_probs_indexing", 2, "each layer's weights are its own", "tests/engine/test_attention.py::weights_are_those_of_transformers"),
    Asked("interp-engine test_attn_probs_indexing", 2, "layers of linear attention are refused, before anything runs", "tests/unit/runtime/worker/readouts/test_layers.py::layers_whose_attention_cannot_be_computed_again_say_why"),
    Asked("interp-engine test_sliding_window_attn", 5, "weights computed again: causal, within the window, less than 1 in sum with sinks alone", "tests/unit/runtime/worker/readouts/test_reader.py::rows_are_those_of_each_query_by_itself"),
    Asked("interp-engine test_sliding_window_attn", 3, "its reading of each layer's window from the config", "nothing"),
    Asked("interp-engine test_sliding_window_attn", 1, "layers of linear attention are told from others", "tests/unit/runtime/worker/readouts/test_layers.py::layers_whose_attention_cannot_be_computed_again_say_why"),
    Asked("interp-engine test_sliding_window_attn", 1, "behind the window the weights are transformers', in banded and full layers", "tests/engine/test_attention.py::weights_are_those_of_transformers"),
    Asked("vllm-lens test_attention_helper", 7, "weights of queries and keys, with groups, window, soft cap, ALiBi, sinks and single queries, against loops", "tests/unit/runtime/worker/readouts/test_reader.py::rows_are_those_of_each_query_by_itself"),
    Asked("vllm-lens test_attention_helper", 1, "ALiBi by square roots is refused", "tests/unit/runtime/worker/readouts/test_layers.py::layers_whose_attention_cannot_be_computed_again_say_why"),
    Asked("vllm-lens test_attention_helper", 5, "shapes and dictionaries that its helper takes, and rows that see no key", "nothing"),
    Asked("vllm-lens test_qk_chunked_prefill", 1, "a prompt in chunks has each position once", "tests/engine/test_inner_sites.py::rows_of_inner_sites_are_what_the_modules_of_transformers_read_and_return"),
    Asked("vllm-lens test_qk_chunked_prefill", 1, "and its weights are transformers'", "tests/engine/test_attention.py::weights_are_those_of_transformers"),
    Asked("vllm-lens test_qk_exact", 3, "queries and keys are what attention gets: prompt, chunks, generated tokens, every layer", "tests/engine/test_inner_sites.py::rows_of_inner_sites_are_what_the_modules_of_transformers_read_and_return"),
    Asked("vllm-lens test_qk_exact", 1, "they come out of both wire formats as they went in", "tests/engine/test_captured_heads.py::they_come_out_of_bytes_and_files_as_they_went_in"),
    Asked("vllm-lens test_qk_exact", 2, "the same over two tensor ranks and two stages", "tests/system/test_inner_ranks.py::rows_of_every_site_are_those_of_one_rank"),
    Asked("vllm-lens test_qk_match", 3, "weights are transformers', of prompts, generated tokens, and each request of a batch", "tests/engine/test_attention.py::weights_are_those_of_transformers"),
    Asked("vllm-lens test_qk_match", 1, "queries and keys have the shape of their heads", "tests/engine/test_captured_heads.py::rows_are_those_of_each_head"),
    Asked("vllm-lens test_qk_match", 1, "all layers come when all are asked for", "tests/engine/test_inner_sites.py::rows_of_inner_sites_are_what_the_modules_of_transformers_read_and_return"),
    Asked("vllm-lens test_qk_match", 1, "the residual stream comes beside them", "tests/engine/test_attention.py::vectors_beside_attention_stay_what_they_are"),
    Asked("vllm-lens test_qk_match", 1, "nothing is left on the worker afterwards", "tests/system/test_serving.py::nothing_is_left_once_all_have_their_answers"),
    Asked("vllm-lens test_qk_match", 1, "multi-head latent attention is refused by name", "tests/unit/runtime/worker/readouts/test_layers.py::layers_whose_attention_cannot_be_computed_again_say_why"),
    Asked("vllm-lens test_qk_merge", 4, "heads and layers of ranks come together in order, and copies of key heads count once", "tests/system/test_inner_ranks.py::rows_of_every_site_are_those_of_one_rank"),
    Asked("vllm-lens test_qk_merge", 3, "its merge of pickled, single and missing parts", "nothing"),
    Asked("vllm-lens test_qk_parallel", 2, "weights over two tensor ranks and two stages are transformers'", "tests/system/test_inner_ranks.py::attention_of_every_head_is_that_of_one_rank"),
    Asked("vllm-lens test_qk_parity_models", 1, "weights of nine architectures are transformers'; here of seven", "tests/engine/test_attention.py::weights_are_those_of_transformers"),
    Asked("vllm-lens test_qk_parity_models", 1, "with key heads copied over ranks too", "tests/system/test_inner_ranks.py::attention_of_every_head_is_that_of_one_rank"),
    Asked("vllm-lens test_qk_parity_models", 2, "layers without such attention are left out or refused: hybrid models, latent attention", "tests/unit/runtime/worker/readouts/test_layers.py::layers_whose_attention_cannot_be_computed_again_say_why"),
    Asked("EasySteer tests/moe/test_moe_compiled", 1, "which of its ops split the compiled graph", "nothing"),
    Asked("EasySteer tests/moe/test_moe_compiled", 1, "a compiled engine edits the router of every layer at every token of the prompt", "tests/engine/test_inner_sites.py::compiled_too"),
    Asked("EasySteer tests/moe/test_moe_fullgraph", 1, "its setting keeps full CUDA graphs", "nothing"),
    Asked("EasySteer tests/moe/test_moe_fullgraph", 2, "experts forced out change the output, of their own request in a batch only", "tests/engine/test_inner_sites.py::experts_are_forced_in_and_out_by_their_logits_for_some_tokens_of_some_requests"),
    Asked("EasySteer tests/moe/test_moe_fullgraph", 1, "soft modes of its router edit run", "lacking: spread"),
    Asked("EasySteer tests/moe/test_moe_fullgraph", 1, "its file of experts by layer is taken", "nothing"),
    Asked("EasySteer tests/moe/test_moe_fullgraph", 1, "captured logits of generated tokens show edits of all requests, one exempt and one with its own instead", "lacking: exempt"),
    Asked("EasySteer tests/moe/test_qwen3_smoke", 2, "logits are captured and edited where the experts' module calls the router", "tests/engine/test_routing.py::experts_are_chosen_or_not_as_a_route_says"),
    Asked("EasySteer tests/moe/test_steermoe", 1, "logits of every layer, a row per token, as wide as there are experts", "tests/engine/test_inner_sites.py::rows_of_inner_sites_are_what_the_modules_of_transformers_read_and_return"),
    Asked("EasySteer tests/moe/test_steermoe", 3, "experts forced out are never chosen, were chosen before, and the output changes", "tests/engine/test_routing.py::experts_are_chosen_or_not_as_a_route_says"),
    Asked("EasySteer tests/moe/test_steermoe", 2, "findings about OLMoE: experts of digits, published rankings", "nothing"),
)  # fmt: skip
