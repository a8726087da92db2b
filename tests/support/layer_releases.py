"""Releases of vLLM that have a class of `midstream.runtime.models.vllm_layers`."""

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
