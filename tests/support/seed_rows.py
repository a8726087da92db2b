"""What the projects that midstream started from promise, row by row, and what shows it here.

S0: `VLLM_ACT_*`, modifications; S1: its readme; S2: the fork with steering and capture; S3: hidden
states of `LLM(layers=…)`; S4: the fork's port to vLLM's second model runner.
"""

# ruff: noqa: E501

HERE = "here"  # a test of test_seed_sentences.py
DESIGN = "a statement about the other project's means or scope; nothing to show"
_UNIT, _LAB, _ENGINE = "tests/unit/", "tests/lab/", "tests/engine/"
_SYSTEM, _GPU = "tests/system/", "tests/gpu/"
# What is not shown, by the row of docs/internal/gpu-runs.md that has no result yet.
OPEN = {
    "size": "real weights of 4B parameters and more",
    "hosts": "ranks on two machines",
}
# Families of S2.38, by the beginning of their classes' names. Of the last one no class was built.
FAMILIES = (
    "Llama Qwen Gemma Mixtral Glm InternLM Olmo Exaone Phi Falcon Cohere StableLm Plamo Step Molmo"
)
FAMILIES_NOT_SEEN = "Baichuan"
_PARITY = (
    _ENGINE + "test_parity.py::every_site_of_every_layer_reads_and_edits_as_hooks_in_transformers"
)
_ACT = _SYSTEM + "test_act_mode.py::"
_ACT_FILES = _ACT + "every_request_has_a_file_for_each_layer_and_a_manifest"
_ACT_ROWS = _ACT + "the_files_have_the_rows"
_ACT_UNIT = _UNIT + "compat/test_act_environment.py::"
_RANKS = _SYSTEM + "test_ranks.py::"
_TP, _PP = (
    _RANKS + "two_tensor_ranks_give_what_one_rank_gives",
    _RANKS + "ranks_give_what_one_rank_gives",
)
_TIERS = _ENGINE + "test_tiers.py::"
_SINKS = _ENGINE + "test_sinks.py::"
_DEFAULT, _ASYNC = _ENGINE + "test_default_capture.py::", _SYSTEM + "test_default_async.py::"
_LAYERS = _UNIT + "api/test_arguments.py::"
_SERVING = _SYSTEM + "test_serving.py::"
_GRAPHS = (
    _GPU + "test_smollm2.py::graphs_and_compilation_are_on_and_the_runner_is_the_one_asked_for"
)
_GPU_MIX = _GPU + "test_adversarial.py::every_request_of_a_random_mix_gets_what_it_gets_alone"
_MIX = _ENGINE + "test_adversarial.py::every_request_of_a_random_mix_gets_what_it_gets_alone"
_REPO = "tests/repo/"
# On a GPU too, with the second runner: docs/internal/gpu-runs.md.
_SESSIONS = (
    _SYSTEM
    + "test_alongside_async.py::a_session_has_every_row_of_all_its_turns_once_and_each_edit_where_asked"
)

ROWS: dict[str, tuple[str, str]] = {
    # id: (what must hold, what shows it)
    "S0.1": ("no hooks of PyTorch are registered", HERE),
    "S0.2": ("rows leave through buffers of the runner", DESIGN),
    "S0.3": ("rows of all tokens, prompt and generated", HERE),
    "S0.4": ("compressed rows go to npz files", _ACT_ROWS),
    "S0.5": ("rp8: random projection in uint8", _ACT_ROWS),
    "S0.6": ("full8: uint8 with scales", _ACT_ROWS),
    "S0.7": ("topk8: indices and uint8 values", _ENGINE + "test_arena.py::what_a_codec_leaves_is_what_it_makes_of_the_rows_in_memory"),
    "S0.8": ("buffers per sequence", _MIX),
    "S0.9": ("files are local to a rank by default", _RANKS + "each_file_of_sharded_rows_is_of_one_rank"),
    "S0.10": ("a worker class installs it, by name or as a class", _ACT_FILES),
    "S0.11": ("variables VLLM_ACT_* switch it on", _ACT_FILES),
    "S0.12": ("each layer is read", _ACT_ROWS),
    "S0.13": ("rows are compressed over prompt and generated tokens", _ACT_ROWS),
    "S0.14": ("a file for each request and layer", _ACT_FILES),
    "S0.15": ("a manifest has shapes, paths and compression", _ACT_FILES),
    "S0.16": ("VLLM_ACT_CAPTURE", _ACT + "switched_off_it_is_plain_vllm"),
    "S0.17": ("VLLM_ACT_MODE", _ACT_ROWS),
    "S0.18": ("VLLM_ACT_RP_K", _ACT_FILES),
    "S0.19": ("VLLM_ACT_RETURN, in the manifest", _ACT_FILES),
    "S0.20": ("VLLM_ACT_OUTDIR", _ACT_UNIT + "the_folder_is_that_of_the_sink"),
    "S0.21": ("CUDA graphs stay enabled", _GRAPHS),
    "S0.22": ("rows are copied to the host before they are written", DESIGN),
    "S0.23": ("metrics.extras has the manifest", _ACT + "the_manifest_is_in_the_metrics_extras_where_there_are_metrics"),
    "S1.1": ("Python 3.10 and later", HERE),
    "S1.2": ("CUDA", _GRAPHS),
    "S1.3": ("the licence is Apache 2.0", HERE),
    "S1.4": ("nothing is computed twice", HERE),
    "S1.5": ("no token is left out", HERE),
    "S1.6": ("the cost depends on codec, layers and ranks", _LAB + "jobs/test_estimate.py::positions_codecs_and_dtypes_count_as_in_a_job"),
    "S1.7": ("sketches of 256 to 512 numbers", _UNIT + "codecs/test_rp8.py::rp8_is_the_page_s_projection_in_the_page_s_full8"),
    "S1.8": ("pip installs it", _UNIT + "test_distribution.py::the_installed_command_shows_its_version_and_its_help"),
    "S1.9": ("LLM(model, worker_cls, tensor_parallel_size)", _ACT_FILES),
    "S1.10": ("defaults of the variables", _ACT_UNIT + "by_default_all_layers_of_every_request_go_to_files_as_sketches_of_512"),
    "S1.11": ("tests of units and of whole engines", HERE),
    "S1.12": ("a benchmark over the number of layers", HERE),
    "S1.13": ("bytes are tokens times layers times width", HERE),
    "S1.14": ("rows are compressed on the device, then written", _ACT_ROWS),
    "S1.15": ("full8 with a scale per row or per dimension", _UNIT + "results/test_serialization.py::rows_saved_with_a_scale_per_dimension_are_read_to_half_a_step"),
    "S1.16": ("topk8 of an MLP", _ENGINE + "test_arena.py::what_a_codec_leaves_is_what_it_makes_of_the_rows_in_memory"),
    "S1.17": ("rp8 of the residual stream", _ACT_ROWS),
    "S1.18": ("notebooks", _REPO + "test_notebooks.py::stored_outputs_are_of_the_stored_code"),
    "S1.19": ("an analysis of performance", HERE),
    "S1.20": ("a reference of the API", _REPO + "test_docs.py::every_public_name_is_in_a_document"),
    "S1.21": ("a page for contributors", HERE),
    "S1.22": ("a citation", HERE),
    "S1.23": ("switched off it is plain vLLM", _ACT + "switched_off_it_is_plain_vllm"),
    "S2.1": ("vectors are added to the residual stream", _ENGINE + "test_parity.py::every_site_of_every_layer_reads_and_edits_as_hooks_in_transformers"),
    "S2.2": ("steering by vectors, directions and SAE features", _ENGINE + "test_operations.py::every_operation_at_every_site_does_what_its_formula_says"),
    "S2.3": ("consumers of rows are plugins", _SYSTEM + "test_example_packages.py::an_installed_sink_is_found_by_its_name_and_gets_the_rows"),
    "S2.4": ("rows go to disk, to a loop, to any plugin, by class path or as an object", _SINKS + "sinks_given_as_an_object_and_by_class_path_have_the_rows"),
    "S2.5": ("a filesystem consumer is built in", _SINKS + "the_consumers_request_is_kept_under_its_tag_and_id"),
    "S2.6": ("pre_attn, post_attn and post_block", HERE),
    "S2.7": ("over a hundred decoder architectures", _REPO + "test_seed_rows.py::over_a_hundred_architectures_were_seen_to_be_right"),
    "S2.8": ("continuous batching", _MIX),
    "S2.9": ("torch.compile", _ENGINE + "test_inner_sites.py::compiled_too"),
    "S2.10": ("CUDA graphs", _GRAPHS),
    "S2.11": ("tensor and pipeline parallelism", _TP),
    "S2.12": ("steps that capture need no eager mode", _GRAPHS),
    "S2.13": ("captures of every request run inside graphs", _GRAPHS),
    "S2.14": ("a list of captures that graphs support", DESIGN),
    "S2.15": ("requests without captures run at full speed", _REPO + "test_seed_rows.py::an_idle_engine_was_measured_at_the_speed_of_plain_vllm"),
    "S2.16": ("prefill edits have prefix-cache keys of their own, decode edits have none", _ENGINE + "test_poisoning.py::the_plain_prefix_of_an_edit_of_some_positions_is_shared_both_ways"),
    "S2.17": ("only the suffix that is read is computed again", _ENGINE + "test_poisoning.py::a_hit_ends_at_the_block_below_the_first_position_that_is_read"),
    "S2.18": ("server-wide steering reaches every worker", _SYSTEM + "test_replicas.py::server_wide_edits_by_name_reach_requests_on_each_replica"),
    "S2.19": ("rows of pipeline stages are merged", _PP),
    "S2.20": ("the same across machines", "open: hosts"),
    "S2.21": ("consumers are found by entry points", _SYSTEM + "test_example_packages.py::an_installed_sink_is_found_by_its_name_and_gets_the_rows"),
    "S2.22": ("layouts of files", _UNIT + "sinks/test_files.py::every_layout_has_the_same_arrays"),
    "S2.23": ("a Gemma 3 that takes images is steered; enable_steering is in unit/config", _ENGINE + "test_images.py::an_edit_at_all_images_is_a_hook_at_their_tokens"),
    "S2.24": ("steering_vectors by hook point and layer, with a scale", _ENGINE + "test_tiers.py::sampling_params_say_the_same_as_edits"),
    "S2.25": ("decode_steering_vectors", _TIERS + "sampling_params_say_the_same_as_edits"),
    "S2.26": ("three tiers that add up, for all and by request", _TIERS + "each_tier_is_for_its_own_tokens_and_they_add_up"),
    "S2.27": ("named modules with tiers", _TIERS + "a_name_of_whole_edits_is_its_edits_and_keeps_them_while_a_request_runs"),
    "S2.28": ("routes /v1/steering", _SERVING + "the_endpoints_as_elsewhere_are_the_same_steering"),
    "S2.29": ("changes over HTTP are guarded", _UNIT + "server/test_admin.py::changes_need_the_admin_key_where_there_is_one"),
    "S2.30": ("a client over HTTP", _SYSTEM + "test_serving_docs.py::the_example_of_a_client_steers_the_server_and_leaves_it_as_it_was"),
    "S2.31": ("a server is started with a consumer", _SERVING + "rows_for_a_store_are_where_the_answer_says"),
    "S2.32": ("FilesystemCaptureRequest", _SINKS + "the_consumers_request_is_kept_under_its_tag_and_id"),
    "S2.33": ("SamplingParams(capture={consumer: request})", _UNIT + "api/test_sampling_params.py::captures_and_probes_are_taken_in_every_form"),
    "S2.34": ("consumers of every request, or by request", _SINKS + "a_capture_of_every_request_is_there_beside_its_own_and_without"),
    "S2.35": ("results on capture_results", HERE),
    "S2.36": ("policies for a full arena", _ENGINE + "test_arena.py::what_has_no_room_is_dropped_counted_and_nothing_else_is_wrong"),
    "S2.37": ("an example of a plugin", _SYSTEM + "test_example_packages.py::an_installed_sink_is_found_by_its_name_and_gets_the_rows"),
    "S2.38": ("the named model families", _REPO + "test_seed_rows.py::the_families_that_are_named_were_seen_to_be_right"),
    "S2.39": ("real weights of large models", "open: size"),
    "S2.40": ("steering that changes for later requests", HERE),
    "S2.41": ("steering that changes within a request", _ENGINE + "test_controllers.py::each_answer_holds_from_the_next_step_on"),
    "S2.42": ("a monitor with a sigmoid", _ENGINE + "test_operations.py::every_operation_at_every_site_does_what_its_formula_says"),
    "S2.43": ("a monitor opens a tier in the same forward pass", _ENGINE + "test_operations.py::every_operation_at_every_site_does_what_its_formula_says"),
    "S2.44": ("prefix-cache keys of steering that changes", _ENGINE + "test_updates.py::a_continuation_reuses_blocks_of_the_same_versions_only"),
    "S2.45": ("a model of 31B on several GPUs", "open: size"),
    "S2.46": ("activation patching", _ENGINE + "test_sweep.py::every_cell_is_what_a_hook_gives"),
    "S2.47": ("stock vLLM is installed as always", _UNIT + "test_plugin.py::loading_the_plugins_changes_nothing_in_vllm"),
    "S3.1": ("hidden states at run time", _PARITY),
    "S3.2": ("pip or uv install it", _UNIT + "test_distribution.py::the_installed_command_shows_its_version_and_its_help"),
    "S3.3": ("a drop-in replacement of vLLM", HERE),
    "S3.4": ("saved during generation, or streamed by token", _ASYNC + "each_output_has_the_rows_of_the_tokens_so_far"),
    "S3.5": ("the release of vLLM that is pinned", DESIGN),
    "S3.6": ("one LLM per process", _ENGINE + "test_isolation.py::two_engines_in_one_process_keep_to_themselves"),
    "S3.7": ("eager mode alone", _ENGINE + "test_inner_sites.py::compiled_too"),
    "S3.8": ("SamplingParams from the package", HERE),
    "S3.9": ("LLM(model, layers, max_model_len, …)", _ENGINE + "test_front_door.py::default_layers_give_plain_dicts_of_hidden_states"),
    "S3.10": ("SamplingParams(n, temperature, top_p, max_tokens)", _ASYNC + "each_output_has_the_rows_of_the_tokens_so_far"),
    "S3.11": ("vLLM's own API is unchanged", HERE),
    "S3.12": ("hidden_states by layer", _DEFAULT + "there_are_as_many_rows_as_tokens_with_the_last_tokens_row"),
    "S3.13": ("a row for each output token", _DEFAULT + "there_are_as_many_rows_as_tokens_with_the_last_tokens_row"),
    "S3.14": ("AsyncLLM(model, layers, max_model_len)", _ASYNC + "each_output_has_the_rows_of_the_tokens_so_far"),
    "S3.15": ("generate without a request id", _ASYNC + "calls_without_a_request_id_have_different_ones"),
    "S3.16": ("outputs with partial hidden states", _ASYNC + "each_output_has_the_rows_of_the_tokens_so_far"),
    "S3.17": ("the last output has all", _ASYNC + "the_last_output_has_as_many_rows_as_tokens_on_wish"),
    "S3.18": ("a data set to files", _SYSTEM + "test_capture_command.py::rows_are_those_of_the_same_prompts_in_memory"),
    "S3.19": ("layers as a list or all", _ENGINE + "test_front_door.py::default_layers_give_plain_dicts_of_hidden_states"),
    "S3.20": ("the stream after the layer", _PARITY),
    "S3.21": ("include_prefill", _LAYERS + "an_output_has_its_rows_by_layer_as_plain_dicts"),
    "S3.22": ("prefill_hidden", _DEFAULT + "there_are_as_many_rows_as_tokens_with_the_last_tokens_row"),
    "S3.23": ("include_decode", _LAYERS + "an_output_has_its_rows_by_layer_as_plain_dicts"),
    "S3.24": ("hidden", _DEFAULT + "there_are_as_many_rows_as_tokens_with_the_last_tokens_row"),
    "S3.25": ("last_prefill_token", _ASYNC + "last_rows_are_one_row_each"),
    "S3.26": ("last_decode_token", _ASYNC + "last_rows_are_one_row_each"),
    "S3.27": ("a hook on the model object; remove_hooks", _DEFAULT + "remove_hooks_ends_the_default_capture"),
    "S3.28": ("values of linear probes", _ENGINE + "test_operations.py::every_operation_at_every_site_does_what_its_formula_says"),
    "S4.1": ("the second model runner", _GRAPHS),
    "S4.2": ("what is unsupported is rejected, not ignored", _ENGINE + "test_front_door.py::a_wrong_request_is_refused_by_field_and_the_engine_goes_on"),
    "S4.3": ("the second runner's methods are wrapped", "tests/contract/test_seams.py::the_classes_of_both_runners_fit"),
    "S4.4": ("captures begin and end with their requests", _MIX),
    "S4.5": ("vectors are set and registered", _TIERS + "named_vectors_are_their_values"),
    "S4.6": ("edits change from prompt to generated tokens", _ENGINE + "test_tiers.py::sampling_params_say_the_same_as_edits"),
    "S4.7": ("tests of the second runner's adapter on the CPU", _UNIT + "runtime/worker/model_runner/test_v2.py::a_step_has_the_requests_of_the_batch_and_none_of_its_padding"),
    "S4.8": ("clearing restores what plain vLLM gives", _ENGINE + "test_off_is_off.py::when_everything_is_cleared_it_is_plain_vllm_to_the_bit"),
    "S4.9": ("post_attn at last_prompt is one row", HERE),
    "S4.10": ("ranks on two machines", "open: hosts"),
    "S4.11": ("ranks agree", _TP),
    "S4.12": ("vectors in the request", _ENGINE + "test_tiers.py::sampling_params_say_the_same_as_edits"),
    "S4.13": ("scale 0 is plain, scale 1 steers", _UNIT + "ops/test_site_algebra.py::what_adds_up_to_nothing_leaves_every_bit_in_place"),
    "S4.14": ("a plain request in a mixed batch is as alone", _ENGINE + "test_off_is_off.py::beside_requests_that_are_read_and_edited_plain_ones_are_as_without_them"),
    "S4.15": ("tiers of prompt and of generated tokens alone", _ENGINE + "test_tiers.py::each_tier_is_for_its_own_tokens_and_they_add_up"),
    "S4.16": ("pre_attn, post_attn and post_mlp", HERE),
    "S4.17": ("eager and with graphs", _GPU_MIX),
    "S4.18": ("chunked prefill", _ENGINE + "test_isolation.py::chunked_prefill_gives_the_rows_of_a_prefill_in_one_piece"),
    "S4.19": ("captures by request, eager and with graphs", _GPU_MIX),
    "S4.20": ("captures of every request", _SINKS + "a_capture_of_every_request_is_there_beside_its_own_and_without"),
    "S4.21": ("last_prompt, all_generated, all and lists of positions", HERE),
    "S4.22": ("several consumers together", _SINKS + "two_sinks_at_once_get_their_own_captures"),
    "S4.23": ("rows are kept with KV blocks", _ENGINE + "test_reuse.py::a_prompt_that_comes_again_has_its_rows_and_a_hit"),
    "S4.24": ("captures of generated tokens use the prefix cache, those of the prompt do not", _ENGINE + "test_poisoning.py::a_hit_ends_at_the_block_below_the_first_position_that_is_read"),
    "S4.25": ("steering on several ranks", _TP),
    "S4.26": ("captures on several ranks", _PP),
    "S4.27": ("preempted requests stay steered and keep their rows", _ENGINE + "test_alongside.py::running_requests_that_are_reset_end_with_every_row_once"),
    "S4.28": ("sessions of streaming input on the second runner", _SESSIONS),
    "S4.29": ("real weights on a GPU", "open: size"),
    "S4.30": ("no double registration on the way back in, of the second runner", _SESSIONS),
    "S4.31": ("speculative decoding and replicas", _SYSTEM + "test_speculative.py::with_ngrams_all_is_as_without_drafts"),
    "S4.32": ("spill, drop and block", _ENGINE + "test_arena.py::what_has_no_room_lies_on_disk_and_every_row_comes"),
    "S4.33": ("rows are served from a store", _ENGINE + "test_reuse.py::a_turn_of_a_chat_reuses_the_rows_of_all_turns_before"),
}  # fmt: skip
COUNTS = {"S0": 23, "S1": 23, "S2": 47, "S3": 28, "S4": 33}
