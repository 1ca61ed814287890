"""Tiny models of the families people train, built from configurations on the spot, and batches that fit them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 40
ROWS = 2
LENGTH = 8


@dataclass(frozen=True)
class Architecture:
    """A model class and a configuration class of `transformers`, the sizes of the latter, and a kind of batch."""

    model: str
    config: str
    batch: Callable[[torch.Generator], dict[str, Any]]
    sizes: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """The model in training mode with every source of randomness off."""
        import transformers

        config = getattr(transformers, self.config)(**self.sizes)
        _quieten(config)
        model = getattr(transformers, self.model)(config).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model


def batch(architecture: Architecture, step: int, rank: int) -> dict[str, Any]:
    """A batch that follows from its place alone."""
    return architecture.batch(torch.Generator().manual_seed(step * 10 + rank))


def _quieten(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and any(word in name for word in ("drop", "noise", "mask_time", "mask_feature")):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _quieten(value)


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)


def text(generator: torch.Generator) -> dict[str, Any]:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens}


def masked_text(generator: torch.Generator) -> dict[str, Any]:
    tokens = _tokens(generator)
    labels = torch.where(torch.arange(LENGTH) % 3 == 0, tokens, -100)
    return {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}


def pair_of_texts(generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator)}


def image(generator: torch.Generator) -> dict[str, Any]:
    pixels = torch.randn(ROWS, 3, 32, 32, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(2, (ROWS,), generator=generator)}


def image_and_text(generator: torch.Generator) -> dict[str, Any]:
    tokens = _tokens(generator)
    tokens[:, -1] = VOCABULARY - 1  # where the text's embedding is taken
    return {"input_ids": tokens, "pixel_values": image(generator)["pixel_values"], "return_loss": True}


def sound(generator: torch.Generator) -> dict[str, Any]:
    waves = torch.randn(ROWS, 400, generator=generator)
    return {"input_values": waves, "labels": torch.randint(1, VOCABULARY, (ROWS, 3), generator=generator)}


def spectrum(generator: torch.Generator) -> dict[str, Any]:
    features = torch.randn(ROWS, 8, 20, generator=generator)
    return {"input_features": features, "labels": _tokens(generator)}


_MODERN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT = {name: value for name, value in _MODERN.items() if name != "num_key_value_heads"}
_EXPERTS = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_WHISPER = {name: value for name, value in _BART.items() if name not in ("max_position_embeddings",)} | {
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 16,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": 32,
    "patch_size": 8,
}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2}
_SPEECH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_kernel": (8, 4),
    "conv_stride": (4, 4),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "pad_token_id": 0,
    "ctc_loss_reduction": "mean",
}
_CLIP = {
    "text_config": _BERT | {"eos_token_id": VOCABULARY - 1},
    "vision_config": _VIT,
    "projection_dim": 12,
}
_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
_GPT2 = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}
_OPT = _BERT | {"ffn_dim": 24, "word_embed_proj_dim": 16}

ARCHITECTURES = {
    # decoders
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", text, _MODERN),
    "gpt2": Architecture("GPT2LMHeadModel", "GPT2Config", text, _GPT2),
    "opt": Architecture("OPTForCausalLM", "OPTConfig", text, _OPT),
    "bloom": Architecture("BloomForCausalLM", "BloomConfig", text, _GPT2 | {"hidden_size": 16}),
    "falcon": Architecture("FalconForCausalLM", "FalconConfig", text, _BERT),
    "mistral": Architecture("MistralForCausalLM", "MistralConfig", text, _MODERN),
    "qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", text, _MODERN),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", text, _MODERN | {"head_dim": 4}),
    "gemma": Architecture("GemmaForCausalLM", "GemmaConfig", text, _MODERN | {"head_dim": 4}),
    "phi": Architecture("PhiForCausalLM", "PhiConfig", text, _MODERN),
    "gpt_neox": Architecture("GPTNeoXForCausalLM", "GPTNeoXConfig", text, _BERT),
    "gptj": Architecture("GPTJForCausalLM", "GPTJConfig", text, _GPT2 | {"rotary_dim": 4}),
    "stablelm": Architecture("StableLmForCausalLM", "StableLmConfig", text, _MODERN),
    # encoders
    "bert": Architecture("BertForMaskedLM", "BertConfig", masked_text, _BERT),
    "roberta": Architecture("RobertaForMaskedLM", "RobertaConfig", masked_text, _BERT),
    "deberta_v2": Architecture(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        masked_text,
        _BERT | {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
    ),
    "distilbert": Architecture(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        masked_text,
        {"vocab_size": VOCABULARY, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4},
    ),
    "albert": Architecture("AlbertForMaskedLM", "AlbertConfig", masked_text, _BERT | {"embedding_size": 12}),
    "electra": Architecture("ElectraForMaskedLM", "ElectraConfig", masked_text, _BERT | {"embedding_size": 12}),
    # encoder-decoders
    "t5": Architecture("T5ForConditionalGeneration", "T5Config", pair_of_texts, _T5),
    "bart": Architecture("BartForConditionalGeneration", "BartConfig", pair_of_texts, _BART),
    "pegasus": Architecture("PegasusForConditionalGeneration", "PegasusConfig", pair_of_texts, _BART),
    "whisper": Architecture("WhisperForConditionalGeneration", "WhisperConfig", spectrum, _WHISPER),
    # vision
    "vit": Architecture("ViTForImageClassification", "ViTConfig", image, _VIT),
    "deit": Architecture("DeiTForImageClassification", "DeiTConfig", image, _VIT),
    "swin": Architecture(
        "SwinForImageClassification",
        "SwinConfig",
        image,
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
    ),
    "convnext": Architecture("ConvNextForImageClassification", "ConvNextConfig", image, _STAGES | {"image_size": 32}),
    "resnet": Architecture(
        "ResNetForImageClassification", "ResNetConfig", image, {"embedding_size": 8, **_STAGES, "layer_type": "basic"}
    ),
    "clip": Architecture("CLIPModel", "CLIPConfig", image_and_text, _CLIP),
    # speech
    "wav2vec2": Architecture("Wav2Vec2ForCTC", "Wav2Vec2Config", sound, _SPEECH),
    "hubert": Architecture("HubertForCTC", "HubertConfig", sound, _SPEECH),
    # mixtures of experts
    "mixtral": Architecture("MixtralForCausalLM", "MixtralConfig", text, _MODERN | {"num_local_experts": 4}),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        text,
        _MODERN | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 12},
    ),
    "switch_transformers": Architecture(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        pair_of_texts,
        _T5 | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    # state space and recurrent
    "mamba": Architecture("MambaForCausalLM", "MambaConfig", text, _MAMBA),
    "mamba2": Architecture(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        text,
        _MAMBA | {"num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    ),
    "falcon_mamba": Architecture("FalconMambaForCausalLM", "FalconMambaConfig", text, _MAMBA),
    "rwkv": Architecture(
        "RwkvForCausalLM",
        "RwkvConfig",
        text,
        {"vocab_size": VOCABULARY, "hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2},
    ),
}


def pixels(generator: torch.Generator) -> dict[str, Any]:
    image = torch.randn(ROWS, 3, 32, 32, generator=generator)
    return {"pixel_values": image, "labels": torch.randint(3, (ROWS, 32, 32), generator=generator)}


def classes(generator: torch.Generator) -> dict[str, Any]:
    return {**pixels(generator), "labels": torch.tensor([0, 2])}


def series(generator: torch.Generator) -> dict[str, Any]:
    values = torch.randn(ROWS, 20, 2, generator=generator)
    return {"past_values": values[:, :16], "future_values": values[:, 16:]}


# Models with statistics of norms and other float buffers, for 16 bits.
BUFFERED: dict[str, Architecture] = {
    "segformer": Architecture(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        pixels,
        {
            "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 8],
            "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
            "decoder_hidden_size": 8, "num_labels": 3,
        },
    ),
    "mobilenet_v2": Architecture(
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        classes,
        {"num_labels": 3, "depth_multiplier": 0.1, "image_size": 32},
    ),
    "patchtst": Architecture(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        series,
        {
            "num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4,
            "prediction_length": 4, "d_model": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 8,
        },
    ),
}  # fmt: skip
