"""Decoder layers of vLLM's own models, 0.26 to 0.33, read from every `forward` of these releases.

Names are relative to `vllm.model_executor.models.` (`MODELS`) or to `vllm.models.` (`VENDOR`); a
subclass that does not override `forward` has no entry of its own.

Known, and harmless to taps:
- `falcon` (sequential form) adds attention to its input in place, and the fused norms of
  all `pair` layers overwrite both halves in place: capture at the entry, not later.
- Qwen3-VL and its like add vision features to the stream between layers ("deepstack"), so
  `resid_pre[i + 1]` is not `resid_post[i]` in the first few layers.
- Multimodal engines call layer 0 with a slice of the runner's own `inputs_embeds` buffer, which an
  edit at `resid_pre[0]` overwrites; it is refilled before every step.
"""

from __future__ import annotations

from dataclasses import replace

from midstream.runtime.models.convention import (
    CONV,
    LINEAR,
    LONE_MIXER,
    MAMBA,
    PARALLEL,
    SCALED,
    Choice,
    Entry,
    Half,
    Input,
    Lack,
    Output,
    Refusal,
    Returns,
    dead,
    hybrid,
    pair,
    single,
    without_attention,
)

# mid is named for the norm after attention, which feeds the MLP …
NORM = "post_attention_layernorm"
# … except in models that also norm what attention returns.
PRE_FF = "pre_feedforward_layernorm"

POST_FF = "post_feedforward_layernorm"
# The MLP gets the same tensor object as the stream, or as attention.
SHARED = Input("mlp", shared=True)

P = pair(NORM)
P_PRE_FF = pair(PRE_FF)
P_FFN_NORM = pair("ffn_norm", mlp="feed_forward")
P_MIXER = pair("pre_mlp_norm", attention="mixer")
P_EXPERTS = pair(NORM, mlp="block_sparse_moe")
P_FLOAT16 = pair(NORM, float16_scaled=True)
# Mamba, attention or MLP alone.
P_MAMBA = pair(no_mid=LONE_MIXER, attention=Lack(MAMBA), mlp=Lack("a Mamba layer has no MLP"))
P_ATTENTION = pair(
    no_mid=LONE_MIXER,
    attention="mixer",
    attn=Half.AT_EXIT,
    mlp=Lack("an attention layer of this model has no MLP"),
)
P_MLP = pair(
    no_mid=LONE_MIXER, attention=Lack("an MLP layer of this model has no attention"), mlp="mixer"
)
S = single(NORM)
S_SCALED = single(NORM, attn=SCALED, mlp_out=SCALED)
D = dead(NORM)
D_PARALLEL = dead(no_mid=PARALLEL, mlp=SHARED)
# Post-norm: what is normed is what attention and the MLP return.
POST_NORM = single("mlp", attn=NORM, mlp=SHARED, mlp_out=POST_FF)
POST_NORM_MOLMO = replace(
    single("mlp", attn="input_layernorm", mlp=SHARED, mlp_out=NORM), returns=Returns.PAIR_NONE
)
# Experts and a shared MLP are called one after the other with what the norm returned.
NORM_OUT = Output(NORM)

# Cohere's are reduced over the ranks after they were summed.
BOTH_READ = Input("self_attn", shared=True, parameter="hidden_states")
C_ATTN, C_MLP = Output("self_attn", partial=True), Output("mlp", partial=True)
# The sum is scaled last, after what the token adds to each layer.
GEMMA4 = replace(
    single(PRE_FF, attn=NORM, mlp_out=POST_FF),
    returns=Returns.PAIR_NONE,
    unsummed=("resid_post",),
)
# Both norms' outputs may be what the skip connections have, in place of the stream.
BOTH = ("resid_mid", "resid_post")
SKIPS_STREAM = single(NORM, attention="self_attention", mlp=SHARED)
SKIPS_NORMED = replace(SKIPS_STREAM, unsummed=BOTH)
# Only its true attention, MLA, has a rank for the keys and values.
KIMI = Choice("self_attn.kv_lora_rank?", P, without_attention(P, LINEAR))
TWICE = Lack("it has two attentions and three MLPs")
NO_MLP = Lack("this layer's MLP was pruned away")
NO_ATTENTION = Lack("this layer's attention was pruned away")
ONLY_MAMBA = Lack("only Mamba's output is added to the stream")
ONE_KERNEL = Lack("small batches run attention's sum, norm and experts in one kernel")
BIASED = Lack("its bias is added outside the module")
TWO_STREAMS = Lack("the MLP runs on a separate CUDA stream")

SHARDED = Refusal("its stream is sharded by token over the ranks (sequence-parallel MoE)")
LOOPED = Refusal("the same layer runs several times in one forward pass")
# Beside a branch's output it returns the streams from before, and the numbers that mix both.
HYPER = Refusal(
    "its streams are mixed by hyper-connections in the next layer's kernel: at a layer's end no "
    "tensor has them"
)
CROSS = Refusal("it is an encoder-decoder layer with cross-attention")
BANK = Refusal("its stream is a bank of residuals that attention mixes")
LATE_SUM = Refusal("it leaves the sum of its MLP to the next layer, after a convolution")
TWO_TENSORS = Refusal("it returns an object with stream and branch as separate tensors")
BRANCH = Refusal("it is a branch inside another layer, not a decoder layer")

# Layers like Llama's: a norm and attention, then a norm and the MLP.
_LIKE_LLAMA = (
    "arcee.ArceeDecoderLayer", "chameleon.ChameleonDecoderLayer",
    "ernie45_moe.Ernie4_5_MoeDecoderLayer", "ernie45_vl_moe.Ernie4_5_VLMoeDecoderLayer",
    "exaone_moe.ExaoneMoeDecoderLayer", "gemma.GemmaDecoderLayer", "glm4.Glm4DecoderLayer",
    "glm4_moe.Glm4MoeDecoderLayer", "glm4_moe_lite.Glm4MoeLiteDecoderLayer",
    "hy_v3.HYV3DecoderLayer", "interns1_pro.InternS1ProMoeDecoderLayer",
    "k2_horizon.K2HorizonDecoderLayer", "laguna.LagunaDecoderLayer", "llama.LlamaDecoderLayer",
    "mimo_v2.MiMoV2FlashDecoderLayer", "mistral.MistralDecoderLayer", "molmo.MolmoDecoderLayer",
    "molmo2.Molmo2DecoderLayer", "nemotron.NemotronDecoderLayer", "olmoe.OlmoeDecoderLayer",
    "param2moe.Param2MoEDecoderLayer", "qwen2.Qwen2DecoderLayer", "qwen2_moe.Qwen2MoeDecoderLayer",
    "qwen3.Qwen3DecoderLayer", "qwen3_moe.Qwen3MoeDecoderLayer", "sarvam.SarvamMLABlock",
    "seed_oss.SeedOssDecoderLayer", "step1.StepDecoderLayer",
)  # fmt: skip

# In every release from 0.26 to 0.33, unless tests/support/layer_releases.py says otherwise.
MODELS: dict[str, Entry] = {
    **dict.fromkeys(_LIKE_LLAMA, P),
    "AXK1.AXK1DecoderLayer": P_FLOAT16,
    "afmoe.AfmoeDecoderLayer": pair("pre_mlp_layernorm"),
    "apertus.ApertusDecoderLayer": pair("feedforward_layernorm"),
    # The experts of an Arctic layer read the stream from before attention; only its dense
    # residual MLP comes after.
    "arctic.ArcticDecoderLayer": Choice(
        "use_residual",
        single(
            "residual_layernorm",
            mlp=Lack("its experts and its dense MLP read different vectors"),
            mlp_out=Lack("its experts and its dense MLP are added in one step"),
        ),
        single(NORM, mlp="block_sparse_moe"),
    ),
    "bailing_moe.BailingMoeBlock": pair(NORM, attention="attention"),
    "bailing_moe_linear.BailingMoeV25DecoderLayer": Choice(
        "attention_type", P, without_attention(P, LINEAR)
    ),
    "bailing_moe_v3.BailingMoeV3DecoderLayer": hybrid("is_kda_layer", P, LINEAR),
    # With apply_residual_connection_post_layernorm the skip connection has the norm's output. An
    # edit before the norm still reaches it, and attention and MLP get copies.
    "bloom.BloomBlock": Choice(
        "apply_residual_connection_post_layernorm", SKIPS_NORMED, SKIPS_STREAM
    ),
    "chameleon.ChameleonSwinDecoderLayer": Refusal(
        "its model adds the last residual twice, so the last layer's output is not the stream"
    ),
    "chatglm.GLMBlock": Choice(
        "apply_residual_connection_post_layernorm", SKIPS_NORMED, SKIPS_STREAM
    ),
    # From 0.33 on the fused norm is used where the model has RMSNorm; before, never.
    "cohere2_moe.Cohere2MoeDecoderLayer": Choice(
        "uses_rms_norm?",
        Choice(
            "dual_stream?",
            pair(no_mid=PARALLEL, attention=BOTH_READ, attn=C_ATTN, mlp=TWO_STREAMS),
            pair(no_mid=PARALLEL, attn=C_ATTN, mlp=SHARED, mlp_out=C_MLP),
        ),
        Choice(
            "dual_stream?",
            dead(no_mid=PARALLEL, attention=BOTH_READ, attn=C_ATTN, mlp=TWO_STREAMS),
            dead(no_mid=PARALLEL, attn=C_ATTN, mlp=SHARED, mlp_out=C_MLP),
        ),
    ),
    "cohere_asr.CohereASRDecoderLayer": CROSS,
    "cohere_compass.CohereCompassDecoderLayer": D_PARALLEL,
    "commandr.CohereDecoderLayer": dead(no_mid=PARALLEL, attn=C_ATTN, mlp=SHARED, mlp_out=C_MLP),
    # From 0.28 on it calls another method of its attention than forward.
    "cosmos3_edge.Cosmos3EdgeAttentionDecoderLayer": replace(P_ATTENTION, attn_in=Output("norm")),
    "dbrx.DbrxBlock": single("norm_attn_norm.norm_2", attention="norm_attn_norm.attn", mlp="ffn"),
    "deepseek_v2.DeepseekV2DecoderLayer": Choice("use_sequence_parallel_moe", SHARDED, P_FLOAT16),
    "domyn_edge.DomynEdgeDecoderLayer": pair(
        "pre_feedforward_norm", attention="attention", mlp="feedforward"
    ),
    "dory.DoryDecoderLayer": LOOPED,
    "embedding_gemma2.EmbeddingGemma2DecoderLayer": single(
        PRE_FF, hidden="h", attn=NORM, mlp_out=POST_FF, unsummed=("resid_post",)
    ),
    "exaone.ExaoneDecoderLayer": pair("ln_2", attention="attn"),
    "exaone4.Exaone4DecoderLayer": dead("mlp", attn=NORM, mlp=SHARED, mlp_out=POST_FF),
    "falcon.FalconDecoderLayer": Choice(
        "reduce_row_parallel_results",
        single(NORM, attention="self_attention", attn=BIASED, mlp=SHARED, mlp_out=BIASED),
        single(
            no_mid=PARALLEL, attention="self_attention", attn=BIASED, mlp=SHARED, mlp_out=BIASED
        ),
    ),
    "falcon_h1.FalconH1AttentionDecoderLayer": BRANCH,
    "falcon_h1.FalconH1ParallelHybrid": single(
        "pre_ff_layernorm",
        attn=Lack("attention and Mamba are scaled and summed before they are added"),
        mlp="feed_forward",
    ),
    "falcon_h1.FalconH1SSMDecoderLayer": BRANCH,
    "fireredlid.FireRedLIDDecoderLayer": CROSS,
    "flex_olmo.FlexOlmoDecoderLayer": replace(POST_NORM, returns=Returns.PAIR_NONE),
    "gemma2.Gemma2DecoderLayer": P_PRE_FF,
    "gemma3.Gemma3DecoderLayer": P_PRE_FF,
    # Attention and the MLP read the active one of its streams (AltUp). What the layer keeps of it
    # halfway has a low-rank branch, LAuReL, in it too.
    "gemma3n.Gemma3nDecoderLayer": single(
        PRE_FF,
        attention=BOTH_READ,
        attn=NORM,
        mlp_out=POST_FF,
        unsummed=("resid_mid", "resid_post"),
        streams="altup.altup_num_inputs",
    ),
    "gemma4.Gemma4DecoderLayer": Choice(
        "enable_moe_block",
        replace(GEMMA4, mlp_in=Lack("its experts read the stream through another norm")),
        GEMMA4,
    ),
    "gpt2.GPT2Block": single("ln_2", attention="attn"),
    "gpt_j.GPTJBlock": single(no_mid=PARALLEL, attention="attn", mlp=SHARED),
    "gpt_neox.GPTNeoXLayer": Choice(
        "use_parallel_residual",
        single(no_mid=PARALLEL, attention="attention"),
        single(NORM, attention="attention"),
    ),
    "gpt_oss.TransformerBlock": pair(NORM, attention="attn"),
    "granite.GraniteDecoderLayer": S_SCALED,
    "granitemoe.GraniteMoeDecoderLayer": single(
        NORM, attn=SCALED, mlp="block_sparse_moe", mlp_out=SCALED
    ),
    "granitemoehybrid.GraniteMoeHybridAttentionDecoderLayer": dead(
        NORM, attn=SCALED, mlp=NORM_OUT, mlp_out=SCALED
    ),
    "granitemoehybrid.GraniteMoeHybridMambaDecoderLayer": dead(
        NORM, attention=Lack(MAMBA), mlp=NORM_OUT, mlp_out=SCALED
    ),
    "granitemoeshared.GraniteMoeSharedDecoderLayer": single(
        NORM, attn=SCALED, mlp=NORM_OUT, mlp_out=SCALED
    ),
    "hrm_text.HrmTextDecoderLayer": LOOPED,
    "hunyuan_v1.HunYuanDecoderLayer": Refusal(
        "it returns three values, keys and values shared between layers among them"
    ),
    "hyperclovax.HyperCLOVAXDecoderLayer": dead(NORM, attn=SCALED, mlp_out=SCALED),
    "internlm2.InternLMDecoderLayer": pair("ffn_norm", attention="attention", mlp="feed_forward"),
    "interns2_mobius.InternS2MobiusDecoderLayer": Choice(
        "use_attn_reduce_scatter_for_moe",
        SHARDED,
        hybrid("linear_attn?", pair(NORM, mlp=NORM_OUT), LINEAR),
    ),
    "iquest_loopcoder.LoopCoderDecoderLayer": LOOPED,
    # The norm is given `hidden_states + residual` and the sum is computed again for the skip.
    "jais2.Jais2DecoderLayer": pair(
        no_mid="its norm is given a copy of the stream, so the skip connection misses an edit",
        attn=Output("self_attn"),
    ),
    # Its attention is a method of the layer, not a module.
    "jamba.JambaAttentionDecoderLayer": pair(
        "pre_ff_layernorm", attention=Output("input_layernorm"), mlp="feed_forward"
    ),
    "jamba.JambaMambaDecoderLayer": pair(
        "pre_ff_layernorm", attention=Lack(MAMBA), mlp="feed_forward"
    ),
    "kimi_linear.KimiDecoderLayer": KIMI,
    "lfm2.Lfm2AttentionDecoderLayer": P_FFN_NORM,
    "lfm2.Lfm2ShortConvDecoderLayer": without_attention(P_FFN_NORM, CONV),
    "lfm2_moe.Lfm2MoeAttentionDecoderLayer": P_FFN_NORM,
    "lfm2_moe.Lfm2MoeShortConvDecoderLayer": without_attention(P_FFN_NORM, CONV),
    "llama4.Llama4DecoderLayer": pair(NORM, mlp="feed_forward"),
    "longcat_flash.FlashDecoderLayer": pair(no_mid=TWICE.reason, attention=TWICE, mlp=TWICE),
    "mamba.MambaDecoderLayer": P_MAMBA,
    "mamba2.Mamba2DecoderLayer": P_MAMBA,
    "minicpm.MiniCPMDecoderLayer": replace(S_SCALED, returns=Returns.PAIR_NONE),
    "minimax_m2.MiniMaxM2DecoderLayer": P_EXPERTS,
    "mixtral.MixtralDecoderLayer": P_EXPERTS,
    "molmo.MolmoDecoderNormAfterLayer": POST_NORM_MOLMO,
    "molmo2.Molmo2DecoderNormAfterLayer": POST_NORM_MOLMO,
    "moondream3.Moondream3DecoderLayer": single(no_mid=PARALLEL, attention="attn", mlp=SHARED),
    "mpt.MPTBlock": single("norm_2", attention="attn", mlp="ffn"),
    "muse_glimmer.MuseGlimmerDecoderLayer": dead(PRE_FF, attn=NORM, mlp_out=POST_FF),
    "nemotron_h.NemotronHAttentionDecoderLayer": P_ATTENTION,
    "nemotron_h.NemotronHMLPDecoderLayer": P_MLP,
    "nemotron_h.NemotronHMambaDecoderLayer": P_MAMBA,
    "nemotron_h.NemotronHMoEDecoderLayer": P_MLP,
    "nemotron_nas.DeciLMDecoderLayer": Choice(
        "_is_no_op_ffn",
        Choice(
            "_is_no_op_attention",
            pair(no_mid=NO_MLP.reason, attention=NO_ATTENTION, mlp=NO_MLP),
            pair(no_mid=NO_MLP.reason, attn=Half.AT_EXIT, mlp=NO_MLP),
        ),
        hybrid("_is_no_op_attention", P, NO_ATTENTION.reason),
    ),
    "nemotron_parse.BartDecoderLayer": CROSS,
    "nemotron_parse.MBartDecoderLayer": CROSS,
    "nemotron_parse3_5.MBartDecoderLayer": single(
        "final_layer_norm", hidden="decoder_hidden_states", mlp="fc1", mlp_out="fc2"
    ),
    "olmo3.Olmo3DecoderLayer": POST_NORM,
    # Its linear-attention layers are pre-norm, its attention layers post-norm.
    "olmo_hybrid.OlmoHybridDecoderLayer": Choice(
        "linear_attn?", without_attention(S, LINEAR), POST_NORM
    ),
    "openpangu.OpenPanguDecoderLayer": Choice(
        "sandwich_norm", pair("pre_mlp_layernorm", float16_scaled=True), P_FLOAT16
    ),
    # Post-norm (the 350m): there is no norm between the sum and the MLP's first matrix.
    "opt.OPTDecoderLayer": Choice(
        "do_layer_norm_before",
        single("final_layer_norm", mlp="fc1", mlp_out="fc2"),
        single("fc1", mlp=Input("fc1", shared=True), mlp_out="fc2", unsummed=BOTH),
    ),
    "orion.OrionDecoderLayer": S,
    "ouro.OuroDecoderLayer": LOOPED,
    "phi.PhiLayer": single(no_mid=PARALLEL, mlp=SHARED),
    "phimoe.PhiMoEDecoderLayer": dead(NORM, mlp="block_sparse_moe"),
    "plamo2.Plamo2DecoderLayer": hybrid("is_mamba", P_MIXER, MAMBA),
    "plamo3.Plamo3DecoderLayer": P_MIXER,
    "qwen3_next.Qwen3NextDecoderLayer": Choice(
        "use_attn_reduce_scatter_for_moe", SHARDED, hybrid("linear_attn?", P, LINEAR)
    ),
    "rnj1.Rnj1DecoderLayer": P_PRE_FF,
    # Its model mixes in the streams of earlier layers before some layers.
    "solar.SolarDecoderLayer": replace(P, unsummed=("resid_pre",)),
    "stablelm.StablelmDecoderLayer": D,
    "step3_text.Step3TextDecoderLayer": pair(NORM, mlp=NORM_OUT),
    "step3p5.Step3p5DecoderLayer": Choice("use_moe", single(NORM, mlp="moe"), S),
    "whisper.WhisperDecoderLayer": CROSS,
    "zamba2.Zamba2AttentionDecoderLayer": BRANCH,
    # The shared transformer's output is added to Mamba's input, not to the stream.
    "zamba2.Zamba2HybridLayer": single(
        no_mid=ONLY_MAMBA.reason,
        attention=Lack("its attention reads the stream and the embedding, side by side"),
        attn=ONLY_MAMBA,
        mlp=ONLY_MAMBA,
    ),
    "zamba2.Zamba2MambaDecoderLayer": single(
        no_mid=LONE_MIXER, attention=Lack(MAMBA), mlp=Lack("a Mamba layer has no MLP")
    ),
    "alice_ai.AliceAIDecoderBlock": Refusal(
        "its model calls `forward_attn_res`, never the layer itself"
    ),
}

# A fused all-reduce takes the norms of these layers. With one rank it calls them, with more it may
# not: hence tp_partial, even where the exit itself is reduced (minimax_m3, AMD).
_P_PARTIAL = pair(NORM, tp_partial=True)
_MINIMAX_M3 = Choice(
    "is_moe_layer", pair(NORM, tp_partial=True, mlp="block_sparse_moe"), _P_PARTIAL
)
# The norm is called with one tensor, to which attention is already added.
_P_SUMMED = pair(NORM, attn=Output("self_attn"))

VENDOR: dict[str, Entry] = {
    "beam.nvidia.model.BeamDecoderLayer": Refusal(
        "it returns the next layer's normalised input too, which an edit would not reach"
    ),
    "deepseek_v32.amd.model.DeepseekV32DecoderLayer": _P_PARTIAL,
    "deepseek_v32.nvidia.model.DeepseekV32DecoderLayer": Choice(
        "use_sequence_parallel?",  # from 0.28 on
        SHARDED,
        Choice(
            "use_sequence_parallel_moe?",  # 0.26
            SHARDED,
            pair(
                NORM,
                # The first layer's is an argument of the layer.
                attention=BOTH_READ,
                tp_partial=True,
                no_pre="the first layer is called with an already normalised input",
            ),
        ),
    ),
    "deepseek_v4.amd.model.DeepseekV4DecoderLayer": HYPER,
    "deepseek_v4.cpu.model.DeepseekV4DecoderLayer": HYPER,
    "deepseek_v4.nvidia.model.DeepseekV4DecoderLayer": HYPER,
    "deepseek_v4.xpu.model.DeepseekV4DecoderLayer": HYPER,
    "deepseek_v41.amd.model.DeepseekV4DecoderLayer": HYPER,
    "deepseek_v41.nvidia.model.DeepseekV4DecoderLayer": HYPER,
    "flint.model.FlintDecoderLayer": pair(
        no_mid=ONE_KERNEL.reason,
        attention=Lack("small batches run the norm and attention in one kernel"),
        attn=ONE_KERNEL,
        mlp=ONE_KERNEL,
        mlp_out=Half.AT_EXIT,
    ),
    "glm5next.common.model.Glm5NextDecoderLayer": HYPER,
    "glm5next.nvidia.model.Glm5NextDecoderLayer": HYPER,
    "hy_v4.amd.model.HYV4DecoderLayer": Choice("enable_ihc", HYPER, _P_SUMMED),
    "hy_v4.nvidia.model.HYV4DecoderLayer": Choice("enable_ihc", HYPER, _P_SUMMED),
    "inkling.amd.model.InklingDecoderLayer": LATE_SUM,
    "inkling.nvidia.model.InklingDecoderLayer": LATE_SUM,
    "kimi_k3.amd.linear.KimiDecoderLayer": Choice("use_attn_residuals", BANK, KIMI),
    "kimi_k3.nvidia.model.KimiDecoderLayer": BANK,
    "minimax_m3.amd.model.MiniMaxM3DecoderLayer": _MINIMAX_M3,
    "minimax_m3.nvidia.model.MiniMaxM3DecoderLayer": _MINIMAX_M3,
    "muse_spark.amd.model.MuseSpark1xDecoderLayer": TWO_TENSORS,
    "muse_spark.nvidia.model.MuseSpark1xDecoderLayer": TWO_TENSORS,
    "qwen4_exp.amd.model.Qwen4ExpDecoderLayer": HYPER,
    "qwen4_exp.nvidia.model.Qwen4ExpDecoderLayer": HYPER,
    "step5.nvidia.model.Step5DecoderLayer": Choice(
        "use_sequence_parallel",
        SHARDED,
        Choice(
            "fp32_residual_connection",
            Refusal("its two halves differ in dtype (float32 residual)"),
            Choice("use_moe", replace(_P_SUMMED, mlp_in=Input("moe")), _P_SUMMED),
        ),
    ),
}
