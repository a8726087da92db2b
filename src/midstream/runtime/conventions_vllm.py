"""Decoder layers of vLLM's own models, 0.26 to 0.33. See `conventions`.

Read from every `forward` of releases 0.26, 0.28, 0.30, 0.32 and 0.33; where releases differ
in what matters, the entry says how it tells them apart. Names are relative to
`vllm.model_executor.models.` (`MODELS`) or to `vllm.models.` (`VENDOR`); a subclass that does
not override `forward` has no entry of its own (Phi-3, GLM-4-9B, Ernie 4.5 and many others are
`llama.LlamaDecoderLayer`).

Known, and harmless to taps:
- `falcon` (sequential form) adds attention to its input in place, and the fused norms of
  all `pair` layers overwrite both halves in place: capture at the entry, not later.
- Qwen3-VL and its like add vision features to the stream between layers ("deepstack"), so
  `resid_pre[i + 1]` is not `resid_post[i]` in the first few layers.
- Multimodal engines hand layer 0 a slice of the runner's own `inputs_embeds` buffer, which an
  edit at `resid_pre[0]` overwrites; it is refilled before every step.
"""

from __future__ import annotations

from midstream.runtime.conventions_types import (
    LONE_MIXER,
    PARALLEL,
    Choice,
    Entry,
    LayerConvention,
    Refusal,
    Returns,
    dead,
    pair,
    single,
)

# mid is named for the norm after attention, which feeds the MLP …
NORM = "post_attention_layernorm"
# … except in models that also norm what attention returns.
PRE_FF = "pre_feedforward_layernorm"

P = pair(NORM)
P_PRE_FF = pair(PRE_FF)
P_FFN_NORM = pair("ffn_norm")
P_LONE = pair(no_mid=LONE_MIXER)
P_FLOAT16 = pair(NORM, float16_scaled=True)
S = single(NORM)
S_PARALLEL = single(no_mid=PARALLEL)
D = dead(NORM)
D_PARALLEL = dead(no_mid=PARALLEL)

SHARDED = Refusal("its stream is sharded by token over the ranks (sequence-parallel MoE)")
LOOPED = Refusal("the same layer runs several times in one forward pass")
HYPER = Refusal("it carries several streams mixed by hyper-connections, not one")
CROSS = Refusal("it is an encoder-decoder layer with cross-attention")
BRANCH = Refusal("it is a branch inside another layer, not a decoder layer")

# In every release from 0.26 to 0.33, unless SINCE or UNTIL says otherwise.
MODELS: dict[str, Entry] = {
    "AXK1.AXK1DecoderLayer": P_FLOAT16,
    "afmoe.AfmoeDecoderLayer": pair("pre_mlp_layernorm"),
    "apertus.ApertusDecoderLayer": pair("feedforward_layernorm"),
    "arcee.ArceeDecoderLayer": P,
    # The experts of an Arctic layer read the stream from before attention; only its dense
    # residual MLP comes after.
    "arctic.ArcticDecoderLayer": Choice("use_residual", single("residual_layernorm"), S),
    "bailing_moe.BailingMoeBlock": P,
    "bailing_moe_linear.BailingMoeV25DecoderLayer": P,
    "bailing_moe_v3.BailingMoeV3DecoderLayer": P,
    # With apply_residual_connection_post_layernorm the skip carries the norm's output; an
    # edit before the norm reaches it all the same.
    "bloom.BloomBlock": S,
    "chameleon.ChameleonDecoderLayer": P,
    "chameleon.ChameleonSwinDecoderLayer": Refusal(
        "its model adds the last residual twice, so the last layer's output is not the stream"
    ),
    "chatglm.GLMBlock": S,  # as bloom
    # From 0.33 on the fused norm is used where the model has RMSNorm; before, never.
    "cohere2_moe.Cohere2MoeDecoderLayer": Choice(
        "uses_rms_norm?", pair(no_mid=PARALLEL), D_PARALLEL
    ),
    "cohere_asr.CohereASRDecoderLayer": CROSS,
    "cohere_compass.CohereCompassDecoderLayer": D_PARALLEL,
    "commandr.CohereDecoderLayer": D_PARALLEL,
    "cosmos3_edge.Cosmos3EdgeAttentionDecoderLayer": P_LONE,
    "dbrx.DbrxBlock": single("norm_attn_norm.norm_2"),
    "deepseek_v2.DeepseekV2DecoderLayer": Choice("use_sequence_parallel_moe", SHARDED, P_FLOAT16),
    "domyn_edge.DomynEdgeDecoderLayer": pair("pre_feedforward_norm"),
    "dory.DoryDecoderLayer": LOOPED,
    "embedding_gemma2.EmbeddingGemma2DecoderLayer": single(PRE_FF, hidden="h"),
    "ernie45_moe.Ernie4_5_MoeDecoderLayer": P,
    "ernie45_vl_moe.Ernie4_5_VLMoeDecoderLayer": P,
    "exaone.ExaoneDecoderLayer": pair("ln_2"),
    "exaone4.Exaone4DecoderLayer": dead("mlp"),
    "exaone_moe.ExaoneMoeDecoderLayer": P,
    "falcon.FalconDecoderLayer": Choice("reduce_row_parallel_results", S, S_PARALLEL),
    "falcon_h1.FalconH1AttentionDecoderLayer": BRANCH,
    "falcon_h1.FalconH1ParallelHybrid": single("pre_ff_layernorm"),
    "falcon_h1.FalconH1SSMDecoderLayer": BRANCH,
    "fireredlid.FireRedLIDDecoderLayer": CROSS,
    "flex_olmo.FlexOlmoDecoderLayer": LayerConvention(Returns.PAIR_NONE, mid="mlp"),
    "gemma.GemmaDecoderLayer": P,
    "gemma2.Gemma2DecoderLayer": P_PRE_FF,
    "gemma3.Gemma3DecoderLayer": P_PRE_FF,
    "gemma3n.Gemma3nDecoderLayer": Refusal("it carries four streams (AltUp), not one"),
    "gemma4.Gemma4DecoderLayer": LayerConvention(Returns.PAIR_NONE, mid=PRE_FF),
    "glm4.Glm4DecoderLayer": P,
    "glm4_moe.Glm4MoeDecoderLayer": P,
    "glm4_moe_lite.Glm4MoeLiteDecoderLayer": P,
    "gpt2.GPT2Block": single("ln_2"),
    "gpt_j.GPTJBlock": S_PARALLEL,
    "gpt_neox.GPTNeoXLayer": Choice("use_parallel_residual", S_PARALLEL, S),
    "gpt_oss.TransformerBlock": P,
    "granite.GraniteDecoderLayer": S,
    "granitemoe.GraniteMoeDecoderLayer": S,
    "granitemoehybrid.GraniteMoeHybridAttentionDecoderLayer": D,
    "granitemoehybrid.GraniteMoeHybridMambaDecoderLayer": D,
    "granitemoeshared.GraniteMoeSharedDecoderLayer": S,
    "hrm_text.HrmTextDecoderLayer": LOOPED,
    "hunyuan_v1.HunYuanDecoderLayer": Refusal(
        "it returns three values, keys and values shared between layers among them"
    ),
    "hy_v3.HYV3DecoderLayer": P,
    "hyperclovax.HyperCLOVAXDecoderLayer": D,
    "internlm2.InternLMDecoderLayer": P_FFN_NORM,
    "interns1_pro.InternS1ProMoeDecoderLayer": P,
    "interns2_mobius.InternS2MobiusDecoderLayer": Choice(
        "use_attn_reduce_scatter_for_moe", SHARDED, P
    ),
    "iquest_loopcoder.LoopCoderDecoderLayer": LOOPED,
    # The norm is given `hidden_states + residual` and the sum is computed again for the skip.
    "jais2.Jais2DecoderLayer": pair(
        no_mid="its norm is given a copy of the stream, so the skip connection misses an edit"
    ),
    "jamba.JambaAttentionDecoderLayer": pair("pre_ff_layernorm"),
    "jamba.JambaMambaDecoderLayer": pair("pre_ff_layernorm"),
    "k2_horizon.K2HorizonDecoderLayer": P,
    "kimi_linear.KimiDecoderLayer": P,
    "laguna.LagunaDecoderLayer": P,
    "lfm2.Lfm2AttentionDecoderLayer": P_FFN_NORM,
    "lfm2.Lfm2ShortConvDecoderLayer": P_FFN_NORM,
    "lfm2_moe.Lfm2MoeAttentionDecoderLayer": P_FFN_NORM,
    "lfm2_moe.Lfm2MoeShortConvDecoderLayer": P_FFN_NORM,
    "llama.LlamaDecoderLayer": P,
    "llama4.Llama4DecoderLayer": P,
    "longcat_flash.FlashDecoderLayer": pair(no_mid="it has two attentions and three MLPs"),
    "mamba.MambaDecoderLayer": P_LONE,
    "mamba2.Mamba2DecoderLayer": P_LONE,
    "mimo_v2.MiMoV2FlashDecoderLayer": P,
    "minicpm.MiniCPMDecoderLayer": LayerConvention(Returns.PAIR_NONE, mid=NORM),
    "minimax_m2.MiniMaxM2DecoderLayer": P,
    "mistral.MistralDecoderLayer": P,
    "mixtral.MixtralDecoderLayer": P,
    "molmo.MolmoDecoderLayer": P,
    "molmo.MolmoDecoderNormAfterLayer": LayerConvention(Returns.PAIR_NONE, mid="mlp"),
    "molmo2.Molmo2DecoderLayer": P,
    "molmo2.Molmo2DecoderNormAfterLayer": LayerConvention(Returns.PAIR_NONE, mid="mlp"),
    "moondream3.Moondream3DecoderLayer": S_PARALLEL,
    "mpt.MPTBlock": single("norm_2"),
    "muse_glimmer.MuseGlimmerDecoderLayer": dead(PRE_FF),
    "nemotron.NemotronDecoderLayer": P,
    "nemotron_h.NemotronHAttentionDecoderLayer": P_LONE,
    "nemotron_h.NemotronHMLPDecoderLayer": P_LONE,
    "nemotron_h.NemotronHMambaDecoderLayer": P_LONE,
    "nemotron_h.NemotronHMoEDecoderLayer": P_LONE,
    "nemotron_nas.DeciLMDecoderLayer": Choice(
        "_is_no_op_ffn", pair(no_mid="this layer's MLP was pruned away"), P
    ),
    "nemotron_parse.BartDecoderLayer": CROSS,
    "nemotron_parse.MBartDecoderLayer": CROSS,
    "nemotron_parse3_5.MBartDecoderLayer": single(
        "final_layer_norm", hidden="decoder_hidden_states"
    ),
    "olmo3.Olmo3DecoderLayer": single("mlp"),
    # Its linear-attention layers are pre-norm, its attention layers post-norm.
    "olmo_hybrid.OlmoHybridDecoderLayer": Choice("linear_attn?", S, single("mlp")),
    "olmoe.OlmoeDecoderLayer": P,
    "openpangu.OpenPanguDecoderLayer": Choice(
        "sandwich_norm", pair("pre_mlp_layernorm", float16_scaled=True), P_FLOAT16
    ),
    # Post-norm (the 350m): there is no norm between the sum and the MLP's first matrix.
    "opt.OPTDecoderLayer": Choice(
        "do_layer_norm_before", single("final_layer_norm"), single("fc1")
    ),
    "orion.OrionDecoderLayer": S,
    "ouro.OuroDecoderLayer": LOOPED,
    "param2moe.Param2MoEDecoderLayer": P,
    "phi.PhiLayer": S_PARALLEL,
    "phimoe.PhiMoEDecoderLayer": D,
    "plamo2.Plamo2DecoderLayer": pair("pre_mlp_norm"),
    "plamo3.Plamo3DecoderLayer": pair("pre_mlp_norm"),
    "qwen2.Qwen2DecoderLayer": P,
    "qwen2_moe.Qwen2MoeDecoderLayer": P,
    "qwen3.Qwen3DecoderLayer": P,
    "qwen3_moe.Qwen3MoeDecoderLayer": P,
    "qwen3_next.Qwen3NextDecoderLayer": Choice("use_attn_reduce_scatter_for_moe", SHARDED, P),
    "rnj1.Rnj1DecoderLayer": P_PRE_FF,
    "sarvam.SarvamMLABlock": P,
    "seed_oss.SeedOssDecoderLayer": P,
    "solar.SolarDecoderLayer": P,
    "stablelm.StablelmDecoderLayer": D,
    "step1.StepDecoderLayer": P,
    "step3_text.Step3TextDecoderLayer": P,
    "step3p5.Step3p5DecoderLayer": S,
    "whisper.WhisperDecoderLayer": CROSS,
    "zamba2.Zamba2AttentionDecoderLayer": BRANCH,
    # The shared transformer's output is added to Mamba's input, not to the stream.
    "zamba2.Zamba2HybridLayer": single(no_mid="only Mamba's output is added to the stream"),
    "zamba2.Zamba2MambaDecoderLayer": single(no_mid=LONE_MIXER),
    "alice_ai.AliceAIDecoderBlock": Refusal(
        "its model calls `forward_attn_res`, never the layer itself"
    ),
}

# The norms of these are handed to a fused all-reduce, which with one rank calls them and with
# more need not: hence tp_partial, even where the exit itself is reduced (minimax_m3, AMD).
_P_PARTIAL = pair(NORM, tp_partial=True)

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
                tp_partial=True,
                no_pre="the first layer is handed its normalised input ready-made",
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
        no_mid="small batches run attention's sum, norm and experts in one kernel"
    ),
    "glm5next.common.model.Glm5NextDecoderLayer": HYPER,
    "glm5next.nvidia.model.Glm5NextDecoderLayer": HYPER,
    "hy_v4.amd.model.HYV4DecoderLayer": Choice("enable_ihc", HYPER, P),
    "hy_v4.nvidia.model.HYV4DecoderLayer": Choice("enable_ihc", HYPER, P),
    "inkling.amd.model.InklingDecoderLayer": Refusal(
        "it leaves the sum of its MLP to the next layer, after a convolution"
    ),
    "inkling.nvidia.model.InklingDecoderLayer": Refusal(
        "it leaves the sum of its MLP to the next layer, after a convolution"
    ),
    "kimi_k3.amd.linear.KimiDecoderLayer": Choice(
        "use_attn_residuals", Refusal("its stream is a bank of residuals that attention mixes"), P
    ),
    "kimi_k3.nvidia.model.KimiDecoderLayer": Refusal(
        "its stream is a bank of residuals that attention mixes"
    ),
    "minimax_m3.amd.model.MiniMaxM3DecoderLayer": _P_PARTIAL,
    "minimax_m3.nvidia.model.MiniMaxM3DecoderLayer": _P_PARTIAL,
    "muse_spark.amd.model.MuseSpark1xDecoderLayer": Refusal(
        "it returns an object that holds stream and branch unblended"
    ),
    "muse_spark.nvidia.model.MuseSpark1xDecoderLayer": Refusal(
        "it returns an object that holds stream and branch unblended"
    ),
    "qwen4_exp.amd.model.Qwen4ExpDecoderLayer": HYPER,
    "qwen4_exp.nvidia.model.Qwen4ExpDecoderLayer": HYPER,
    "step5.nvidia.model.Step5DecoderLayer": Choice(
        "use_sequence_parallel",
        SHARDED,
        Choice(
            "fp32_residual_connection",
            Refusal("its two halves differ in dtype (float32 residual)"),
            P,
        ),
    ),
}

# Classes that not all of 0.26, 0.28, 0.30, 0.32 and 0.33 have: the first release of these in
# which one is found, and the last.
SINCE: dict[str, tuple[str, ...]] = {
    "0.28": (
        "bailing_moe_v3.BailingMoeV3DecoderLayer",
        "deepseek_v32.amd.model.DeepseekV32DecoderLayer",
        "inkling.amd.model.InklingDecoderLayer",
        "interns2_mobius.InternS2MobiusDecoderLayer",
        "kimi_k3.amd.linear.KimiDecoderLayer",
        "kimi_k3.nvidia.model.KimiDecoderLayer",
        "muse_glimmer.MuseGlimmerDecoderLayer",
    ),
    "0.30": (
        "cohere_compass.CohereCompassDecoderLayer",
        "deepseek_v4.cpu.model.DeepseekV4DecoderLayer",
        "deepseek_v41.amd.model.DeepseekV4DecoderLayer",
        "deepseek_v41.nvidia.model.DeepseekV4DecoderLayer",
        "glm5next.nvidia.model.Glm5NextDecoderLayer",
        "hy_v4.nvidia.model.HYV4DecoderLayer",
        "k2_horizon.K2HorizonDecoderLayer",
        "qwen4_exp.amd.model.Qwen4ExpDecoderLayer",
        "qwen4_exp.nvidia.model.Qwen4ExpDecoderLayer",
    ),
    "0.32": (
        "embedding_gemma2.EmbeddingGemma2DecoderLayer",
        "glm5next.common.model.Glm5NextDecoderLayer",
        "hy_v4.amd.model.HYV4DecoderLayer",
    ),
    "0.33": (
        "alice_ai.AliceAIDecoderBlock",
        "beam.nvidia.model.BeamDecoderLayer",
        "domyn_edge.DomynEdgeDecoderLayer",
        "dory.DoryDecoderLayer",
        "flint.model.FlintDecoderLayer",
        "muse_spark.amd.model.MuseSpark1xDecoderLayer",
        "muse_spark.nvidia.model.MuseSpark1xDecoderLayer",
        "nemotron_parse3_5.MBartDecoderLayer",
        "step5.nvidia.model.Step5DecoderLayer",
    ),
}

UNTIL: dict[str, tuple[str, ...]] = {
    "0.26": (
        "kimi_linear.KimiDecoderLayer",
        "ouro.OuroDecoderLayer",
        "plamo2.Plamo2DecoderLayer",
    ),
    "0.28": (
        "arctic.ArcticDecoderLayer",
        "chameleon.ChameleonDecoderLayer",
        "chameleon.ChameleonSwinDecoderLayer",
        "fireredlid.FireRedLIDDecoderLayer",
        "flex_olmo.FlexOlmoDecoderLayer",
        "hunyuan_v1.HunYuanDecoderLayer",
        "mpt.MPTBlock",
        "olmo3.Olmo3DecoderLayer",
    ),
    "0.30": (
        "arcee.ArceeDecoderLayer",
        "glm5next.nvidia.model.Glm5NextDecoderLayer",
        "gpt_neox.GPTNeoXLayer",
        "jais2.Jais2DecoderLayer",
        "phi.PhiLayer",
        "seed_oss.SeedOssDecoderLayer",
    ),
}
