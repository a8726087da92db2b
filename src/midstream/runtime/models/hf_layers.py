"""Decoder layers of transformers' own models (5.19), as vLLM's Transformers backend (0.26 to 0.33)
runs them: the stream comes first and positionally, `[1, tokens, hidden]`, and one tensor is
returned. Norms that it replaces are called as before, so `mid` holds. An MLP's or attention's
forward may be rewritten on the *instance*, whose `__call__` still runs. Outputs are reduced inside
attention and MLP.

Names are `<folder>.<class>` under `transformers.models`, the module being `modeling_<folder>`.
Models whose code comes with their weights are not listed and are rejected as unknown.
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
    Input,
    Lack,
    Output,
    Refusal,
    hybrid,
    single,
    without_attention,
)

NORM = "post_attention_layernorm"
PRE_FF, POST_FF = "pre_feedforward_layernorm", "post_feedforward_layernorm"
# The MLP gets the same tensor object as the stream, or as attention.
SHARED = Input("mlp", shared=True)
# Experts and a shared MLP are called one after the other with what the norm returned.
NORM_OUT = Output(NORM)

S = single(NORM)
S_SCALED = single(NORM, attn=SCALED, mlp_out=SCALED)
# What attention and the MLP return is normed too.
S_SANDWICH = single(PRE_FF, attn=NORM, mlp_out=POST_FF)
# The sum is scaled last, after what the token adds to each layer.
S_GEMMA4 = replace(S_SANDWICH, unsummed=("resid_post",))
S_GLM = single(NORM, attn="post_self_attn_layernorm", mlp_out="post_mlp_layernorm")
S_POST_NORM = single("mlp", attn=NORM, mlp=SHARED, mlp_out=POST_FF)
S_PARALLEL = single(no_mid=PARALLEL, mlp=SHARED)
S_FEED_FORWARD = single("pre_ff_layernorm", mlp="feed_forward")
S_LFM2 = single("ffn_norm", mlp="feed_forward")
LFM2 = Choice("is_attention_layer", S_LFM2, without_attention(S_LFM2, CONV))
HYBRID = hybrid("block_type", S, LINEAR, equals="linear_attention")
TWICE = Lack("it has two attentions and three MLPs")
TUPLE = Refusal("transformers' version of it returns a tuple; use vLLM's own, model_impl='vllm'")

# Layers like Llama's: a norm and attention, then a norm and the MLP.
_LIKE_LLAMA = (
    "arcee.ArceeDecoderLayer", "aria.AriaTextDecoderLayer", "axk1.AXK1DecoderLayer",
    "axk2.AXK2DecoderLayer", "bitnet.BitNetDecoderLayer",
    "cosmos3_edge.Cosmos3EdgeTextDecoderLayer", "cwm.CwmDecoderLayer",
    "deepseek_ocr2.DeepseekOcr2TextDecoderLayer", "deepseek_v2.DeepseekV2DecoderLayer",
    "deepseek_v3.DeepseekV3DecoderLayer", "deepseek_v32.DeepseekV32DecoderLayer",
    "diffllama.DiffLlamaDecoderLayer", "dots1.Dots1DecoderLayer",
    "emu3.Emu3DecoderLayer", "ernie4_5.Ernie4_5DecoderLayer",
    "ernie4_5_moe.Ernie4_5_MoeDecoderLayer", "ernie4_5_vl_moe.Ernie4_5_VLMoeDecoderLayer",
    "exaone_moe.ExaoneMoeDecoderLayer", "gemma.GemmaDecoderLayer", "glm.GlmDecoderLayer",
    "glm4_moe.Glm4MoeDecoderLayer", "glm4_moe_lite.Glm4MoeLiteDecoderLayer",
    "glm4v_moe.Glm4vMoeTextDecoderLayer", "gpt_oss.GptOssDecoderLayer", "helium.HeliumDecoderLayer",
    "hunyuan_v1_dense.HunYuanDenseV1DecoderLayer", "hunyuan_v1_moe.HunYuanMoEV1DecoderLayer",
    "hunyuan_vl.HunYuanVLDenseV1DecoderLayer", "hy_v3.HYV3DecoderLayer", "jais2.Jais2DecoderLayer",
    "laguna.LagunaDecoderLayer", "llama.LlamaDecoderLayer", "mellum.MellumDecoderLayer",
    "mimo_v2_flash.MiMoV2FlashDecoderLayer", "minimax_m2.MiniMaxM2DecoderLayer",
    "minimax_m3_vl.MiniMaxM3VLDecoderLayer", "ministral.MinistralDecoderLayer",
    "ministral3.Ministral3DecoderLayer", "mistral.MistralDecoderLayer",
    "mistral4.Mistral4DecoderLayer", "mixtral.MixtralDecoderLayer", "nanochat.NanoChatDecoderLayer",
    "nemotron.NemotronDecoderLayer", "olmo.OlmoDecoderLayer", "olmoe.OlmoeDecoderLayer",
    "paddleocr_vl.PaddleOCRDecoderLayer", "persimmon.PersimmonDecoderLayer",
    "phi3.Phi3DecoderLayer", "phi4_multimodal.Phi4MultimodalDecoderLayer",
    "phimoe.PhimoeDecoderLayer", "qwen2.Qwen2DecoderLayer", "qwen2_5_omni.Qwen2_5OmniDecoderLayer",
    "qwen2_5_vl.Qwen2_5_VLDecoderLayer", "qwen2_moe.Qwen2MoeDecoderLayer",
    "qwen2_vl.Qwen2VLDecoderLayer", "qwen3.Qwen3DecoderLayer", "qwen3_moe.Qwen3MoeDecoderLayer",
    "qwen3_omni_moe.Qwen3OmniMoeThinkerTextDecoderLayer", "qwen3_vl.Qwen3VLTextDecoderLayer",
    "qwen3_vl_moe.Qwen3VLMoeTextDecoderLayer", "seed_oss.SeedOssDecoderLayer",
    "smollm3.SmolLM3DecoderLayer", "solar_open.SolarOpenDecoderLayer",
    "starcoder2.Starcoder2DecoderLayer", "step3p7.Step3p7DecoderLayer", "youtu.YoutuDecoderLayer",
)  # fmt: skip

HF_MODELS: dict[str, Entry] = {
    **dict.fromkeys(_LIKE_LLAMA, S),
    "afmoe.AfmoeDecoderLayer": single("pre_mlp_layernorm", attn=NORM, mlp_out="post_mlp_layernorm"),
    "apertus.ApertusDecoderLayer": single("feedforward_layernorm"),
    "bamba.BambaDecoderLayer": TUPLE,
    "biogpt.BioGptDecoderLayer": single("final_layer_norm", mlp="fc1", mlp_out="fc2"),
    "bloom.BloomBlock": TUPLE,
    "codegen.CodeGenBlock": TUPLE,
    "cohere.CohereDecoderLayer": S_PARALLEL,
    "cohere2.Cohere2DecoderLayer": S_PARALLEL,
    "cohere2_moe.Cohere2MoeDecoderLayer": S_PARALLEL,
    "cohere_compass.CohereCompassDecoderLayer": S_PARALLEL,
    "deepseek_v4.DeepseekV4DecoderLayer": Refusal(
        "its streams are mixed by hyper-connections, of which midstream knows no layer"
    ),
    "exaone4.Exaone4DecoderLayer": S_POST_NORM,
    "exaone4_5.Exaone4_5_DecoderLayer": S_POST_NORM,
    # Its skip connections are multiplied by learned vectors.
    "doge.DogeDecoderLayer": replace(S, unsummed=("resid_mid", "resid_post")),
    "falcon.FalconDecoderLayer": TUPLE,
    "falcon_h1.FalconH1DecoderLayer": TUPLE,
    "flex_olmo.FlexOlmoDecoderLayer": S_POST_NORM,
    "gemma2.Gemma2DecoderLayer": S_SANDWICH,
    "gemma3.Gemma3DecoderLayer": S_SANDWICH,
    "gemma3n.Gemma3nTextDecoderLayer": Refusal(
        "it has four streams (AltUp); use vLLM's own, model_impl='vllm'"
    ),
    "gemma4.Gemma4TextDecoderLayer": Choice(
        "enable_moe_block",
        replace(S_GEMMA4, mlp_in=Lack("its experts read the stream through another norm")),
        S_GEMMA4,
    ),
    "glm4.Glm4DecoderLayer": S_GLM,
    "glm4v.Glm4vTextDecoderLayer": S_GLM,
    "glm_image.GlmImageTextDecoderLayer": S_GLM,
    "glm_moe_dsa.GlmMoeDsaDecoderLayer": TUPLE,
    "glm_ocr.GlmOcrTextDecoderLayer": S_GLM,
    "gpt2.GPT2Block": single("ln_2", attention="attn"),
    "gpt_bigcode.GPTBigCodeBlock": single("ln_2", attention="attn"),
    "gpt_neo.GPTNeoBlock": TUPLE,
    "gpt_neox.GPTNeoXLayer": Choice(
        "use_parallel_residual",
        single(no_mid=PARALLEL, attention="attention"),
        single(NORM, attention="attention"),
    ),
    "gptj.GPTJBlock": TUPLE,
    "granite.GraniteDecoderLayer": S_SCALED,
    "granite_swa.GraniteSWADecoderLayer": S_SCALED,
    "granitemoe.GraniteMoeDecoderLayer": single(
        NORM, attn=SCALED, mlp="block_sparse_moe", mlp_out=SCALED
    ),
    "granitemoehybrid.GraniteMoeHybridDecoderLayer": Choice(
        "mamba",
        single(NORM, attention=Lack(MAMBA), mlp=NORM_OUT, mlp_out=SCALED),
        single(NORM, attn=SCALED, mlp=NORM_OUT, mlp_out=SCALED),
    ),
    "granitemoeshared.GraniteMoeSharedDecoderLayer": single(
        NORM, attn=SCALED, mlp=NORM_OUT, mlp_out=SCALED
    ),
    "hrm_text.HrmTextDecoderLayer": Refusal(
        "the same layer runs several times in one forward pass"
    ),
    "jamba.JambaAttentionDecoderLayer": S_FEED_FORWARD,
    "jamba.JambaMambaDecoderLayer": without_attention(S_FEED_FORWARD, MAMBA),
    "jetmoe.JetMoeDecoderLayer": single(NORM, attention="self_attention"),
    "kimi_linear.KimiLinearDecoderLayer": HYBRID,
    "lfm2.Lfm2DecoderLayer": LFM2,
    "lfm2_moe.Lfm2MoeDecoderLayer": LFM2,
    "llama4.Llama4TextDecoderLayer": single(NORM, mlp="feed_forward"),
    "longcat_flash.LongcatFlashDecoderLayer": single(
        no_mid=TWICE.reason, attention=TWICE, mlp=TWICE
    ),
    "minicpm3.MiniCPM3DecoderLayer": S_SCALED,
    "mpt.MptBlock": TUPLE,
    "muse_glimmer.MuseGlimmerTextDecoderLayer": S_SANDWICH,
    "nemotron_h.NemotronHBlock": Choice(
        "block_type",
        single(
            no_mid=LONE_MIXER,
            attention="mixer",
            mlp=Lack("an attention layer of this model has no MLP"),
        ),
        Choice(
            "block_type",
            single(no_mid=LONE_MIXER, attention=Lack(MAMBA), mlp=Lack("a Mamba layer has no MLP")),
            single(
                no_mid=LONE_MIXER,
                attention=Lack("an MLP layer of this model has no attention"),
                mlp="mixer",
            ),
            equals="linear_attention",
        ),
        equals="full_attention",
    ),
    "olmo2.Olmo2DecoderLayer": S_POST_NORM,
    "olmo3.Olmo3DecoderLayer": S_POST_NORM,
    "olmo_hybrid.OlmoHybridAttentionDecoderLayer": S_POST_NORM,
    "olmo_hybrid.OlmoHybridLinearAttentionDecoderLayer": without_attention(S, LINEAR),
    "opt.OPTDecoderLayer": Choice(
        "do_layer_norm_before",
        single("final_layer_norm", mlp="fc1", mlp_out="fc2"),
        single(
            "fc1",
            mlp=Input("fc1", shared=True),
            mlp_out="fc2",
            unsummed=("resid_mid", "resid_post"),
        ),
    ),
    "phi.PhiDecoderLayer": S_PARALLEL,
    "qwen3_5.Qwen3_5DecoderLayer": HYBRID,
    "qwen3_5_moe.Qwen3_5MoeDecoderLayer": HYBRID,
    "qwen3_next.Qwen3NextDecoderLayer": HYBRID,
    "stablelm.StableLmDecoderLayer": Choice("use_parallel_residual", S_PARALLEL, S),
    "vaultgemma.VaultGemmaDecoderLayer": single(PRE_FF),
}
