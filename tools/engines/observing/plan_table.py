"""The built-in plans that are made from what was observed, and what they are for."""

from __future__ import annotations

from engines.observing.plan_making import Wanted

_NESTED = ("model.language_model.", "language_model.")
"""Where the language model of a multimodal one is, by newer and older names."""

TABLE: dict[str, Wanted] = {
    "afmoe": Wanted(
        "Arcee Trinity (AFMoE): attention with a gate, norms before and after each block, experts",
        ("Afmoe",),
        "glm4_moe",
    ),
    "apertus": Wanted("Apertus: an MLP without gate, with a learned activation (xIELU)", ("Apertus",), "qwen3"),
    "ernie4_5_moe": Wanted("ERNIE 4.5 with experts: Llama-shaped, first layers dense", ("Ernie4_5_Moe",), "glm4_moe"),
    "exaone_moe": Wanted(
        "K-EXAONE: attention as in Qwen3, first layers dense, then experts", ("ExaoneMoe",), "glm4_moe"
    ),
    "falcon_h1": Wanted(
        "Falcon H1: attention and a state space (Mamba 2) side by side in each layer", ("FalconH1",), "llama"
    ),
    "gemma3n_text": Wanted(
        "The text model of Gemma 3n: AltUp, per-layer embeddings, low-rank residuals", ("Gemma3n",), "gemma2"
    ),
    "gptj": Wanted("GPT-J: q, k, v as tensors of their own, an MLP without gate, biases", ("GPTJ",)),
    "granitemoe": Wanted(
        "Granite 3 and 4 with experts, dense with sinks, and hybrids with state spaces (Mamba 2)",
        ("GraniteMoe", "GraniteMoeShared", "GraniteMoeHybrid", "GraniteSWA", "GraniteMoeSWA"),
        "llama",
    ),
    "hrm_text": Wanted("HRM-Text: two stacks of layers, with gate, q, k, v as one tensor", ("HrmText",)),
    "hyperclovax": Wanted(
        "HyperCLOVA X SEED: Llama-shaped, with norms after each block, too", ("HyperCLOVAX",), "llama"
    ),
    "jamba": Wanted("Jamba: attention among state spaces (Mamba), experts in every other layer", ("Jamba",), "llama"),
    "laguna": Wanted(
        "Laguna: attention with a gate, first layers dense, then experts and a shared one", ("Laguna",), "qwen3_moe"
    ),
    "lfm2": Wanted("LFM2: attention among gated short convolutions", ("Lfm2", "Lfm2Moe"), "llama"),
    "mamba": Wanted("Mamba: state spaces only", ("Mamba",)),
    "mamba2": Wanted("Mamba 2: state spaces with heads and groups", ("Mamba2",)),
    "qwen3_5": Wanted(
        "Qwen3.5 and 3.6: as Qwen3-Next, with q, k, v of linear attention in parts, and a vision part",
        ("Qwen3_5", "Qwen3_5Moe", "Qwen3_5/", "Qwen3_5Moe/"),
        "qwen3_next",
        _NESTED,
    ),
    "stablelm": Wanted("StableLM, Nemotron: Llama-shaped, with biases of norms", ("StableLm", "Nemotron"), "llama"),
    "aria": Wanted("Aria: Llama with experts in one tensor, and a vision part", ("Aria/",), "llama", _NESTED),
    "blip_2": Wanted("BLIP-2: OPT with a vision part and a Q-Former", ("Blip2/",), "opt", _NESTED),
    "cohere2_vision": Wanted(
        "Command A Vision: Cohere 2 with a vision part (SigLIP)", ("Cohere2Vision/",), "cohere", _NESTED
    ),
    "exaone4_5": Wanted("EXAONE 4.5: EXAONE 4 with a vision part", ("Exaone4_5_/",), "olmo2", _NESTED),
    "glm4v": Wanted("GLM 4.1V: GLM 4 with a vision part", ("Glm4v/", "GlmOcr/"), "glm4", _NESTED),
    "glm4v_moe": Wanted("GLM 4.5V: GLM 4.5 with a vision part", ("Glm4vMoe/",), "glm4_moe", _NESTED),
    "granite_speech": Wanted(
        "Granite Speech: Granite with an audio part (Conformer)",
        ("GraniteSpeech/", "GraniteSpeechPlus/"),
        "llama",
        _NESTED,
    ),
    "idefics3": Wanted(
        "Idefics 3, SmolVLM: Llama with a vision part (SigLIP)", ("Idefics3/",), "llama", ("model.text_model.",)
    ),
    "internvl": Wanted("InternVL 3: Qwen with a vision part (InternViT)", ("InternVL/",), "qwen3", _NESTED),
    "llava_next": Wanted(
        "LLaVA-NeXT, LLaVA-NeXT-Video, LLaVA-OneVision", ("LlavaNext/", "LlavaNextVideo/", "LlavaOnevision/"), "llava"
    ),
    "minicpmv4_6": Wanted("MiniCPM-V 4.6 and 4.7", ("MiniCPMV4_6/", "MiniCPMV4_7/"), "qwen3_5", _NESTED),
    "paddleocr_vl": Wanted("PaddleOCR-VL: ERNIE 4.5 with a vision part", ("PaddleOCRVL/",), "llama", _NESTED),
    "paligemma": Wanted("PaliGemma: Gemma with a vision part (SigLIP)", ("PaliGemma/",), "gemma2", _NESTED),
    "qwen2_5_omni": Wanted(
        "Qwen2.5-Omni: Qwen2 with vision and audio parts; the thinker", ("Qwen2_5Omni/",), "qwen2_vl", ("thinker.",)
    ),
    "qwen3_asr": Wanted("Qwen3-ASR: Qwen3 with an audio part", ("Qwen3ASR/",), "qwen3", (*_NESTED, "thinker.")),
    "qwen3_vl": Wanted(
        "Qwen3-VL, Cohere Compass: Qwen3 with a vision part",
        ("Qwen3VL/", "Qwen3VLMoe/", "CohereCompass/"),
        "qwen3_moe",
        _NESTED,
    ),
    "qwen2_audio": Wanted(
        "Qwen2-Audio, Audio Flamingo 3: Qwen2 with an audio part (Whisper)",
        ("Qwen2Audio/", "AudioFlamingo3/"),
        "llama",
        _NESTED,
    ),
    "glmasr": Wanted("GLM-ASR: Llama with an audio part", ("GlmAsr/",), "llama", _NESTED),
    "gemma3n": Wanted("Gemma 3n with its vision and audio parts", ("Gemma3n/",), "gemma3n_text", _NESTED),
    "granite4_vision": Wanted(
        "Granite 4 Vision: Granite with a vision part (SigLIP)", ("Granite4Vision/",), "llama", _NESTED
    ),
    "lfm2_vl": Wanted("LFM2-VL: LFM2 with a vision part (SigLIP)", ("Lfm2Vl/",), "lfm2", _NESTED),
    "muse_glimmer": Wanted("Muse Glimmer, with its vision part", ("MuseGlimmer/",), "qwen3_moe", _NESTED),
    "qianfan_ocr": Wanted("Qianfan-OCR: Qwen3 with a vision part (InternViT)", ("QianfanOCR/",), "qwen3", _NESTED),
    "axk1": Wanted("A.X K1: as DeepSeek V3, with a norm after each MLP", ("AXK1",), "deepseek_v3"),
    "ernie4_5_vl_moe": Wanted(
        "ERNIE 4.5 VL with experts for text and for images", ("Ernie4_5_VLMoe/",), "ernie4_5_moe", _NESTED
    ),
    "hy_v3": Wanted("Hunyuan 3: first layers dense, then experts and a shared MLP", ("HYV3",), "glm4_moe"),
    "hy_v4": Wanted("Hunyuan 4: latent attention with sinks and a gate, hyper-connections", ("HYV4",), "deepseek_v3"),
    "minimax_m2": Wanted("MiniMax M2: as Mixtral, with norms over all heads of q and of k", ("MiniMaxM2",), "mixtral"),
    "moss_transcribe_diarize": Wanted(
        "MOSS Transcribe Diarize: Qwen3 with an audio part (Whisper)", ("MossTranscribeDiarize/",), "qwen3", _NESTED
    ),
    "muse_spark": Wanted(
        "Muse Spark: as Muse Glimmer, with projections before and after the experts",
        ("MuseSpark/",),
        "muse_glimmer",
        _NESTED,
    ),
    "nemotron_h": Wanted(
        "Nemotron H: state spaces (Mamba 2), attention, MLPs without gate, experts", ("NemotronH",), "mamba2"
    ),
    "qwen3_omni_moe": Wanted(
        "Qwen3-Omni: Qwen3 with vision and audio parts; the thinker", ("Qwen3OmniMoe/",), "qwen3_vl", ("thinker.",)
    ),
    "cosmos3_edge": Wanted(
        "Cosmos 3 Edge: Qwen3 with attention of other names, and a vision part", ("Cosmos3Edge/",), "qwen3", _NESTED
    ),
}
