"""Tiny models of the families that parallel runs are compared on, with dropout and odd sizes where they matter."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 35  # not divisible by 2 or 4
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 4}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
_T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_ff": 24, "d_kv": 4, "num_heads": 4, "num_layers": 2}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA | {"attention_dropout": 0.1, "attention_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _LLAMA | {"head_dim": 4, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _LLAMA | {"num_local_experts": 4, "intermediate_size": 32}),
    "bert": ("BertForMaskedLM", "BertConfig", _BERT),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5 | {"decoder_start_token_id": 0, "pad_token_id": 0}),
    "opt": ("OPTForCausalLM", "OPTConfig", _BERT | {"ffn_dim": 24, "word_embed_proj_dim": 16, "pad_token_id": 1}),
    # It norms what attention and feed-forward put out, which is small at first: a smaller eps would amplify rounding.
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _LLAMA | {"rms_norm_eps": 1e-4}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _LLAMA | {"pad_token_id": 0}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        # The loss that balances experts reads what every router has computed.
        _LLAMA
        | {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12}
        | {"output_router_logits": True, "router_aux_loss_coef": 0.5},
    ),
    # Its plan leaves attention whole.
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        _LLAMA
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        | {"moe_intermediate_size": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
        | {"qk_nope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 1},
    ),
    # Tokens come to its experts sorted, and it asks its embedding for a device.
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        _LLAMA | {"num_local_experts": 2, "head_dim": 4, "intermediate_size_mlp": 24},
    ),
    # Its blocks have a convolution over tokens beside attention.
    "falcon_h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        _LLAMA
        | {"head_dim": 4, "mamba_d_ssm": 16, "mamba_n_heads": 4, "mamba_d_head": 4, "mamba_n_groups": 1}
        | {"mamba_d_state": 4, "mamba_chunk_size": 8, "num_hidden_layers": 2},
    ),
}


def build(family: str, **changes: Any) -> nn.Module:
    """A model of the family; the same on every rank."""
    import transformers

    name, config, options = FAMILIES[family]
    torch.manual_seed(3)
    model = getattr(transformers, name)(getattr(transformers, config)(**(options | changes)))
    for parameter in model.parameters():  # biases start at zero, which would hide many mistakes
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn(parameter.shape) * 0.05)
    return model


def batch(
    family: str, step: int, rank: int = 0, rows: int = 4, length: int = 8, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """A batch that depends only on its place."""
    generator = torch.Generator().manual_seed(1 + 100 * step + rank)
    tokens = torch.randint(2, VOCABULARY, (rows, length), generator=generator)
    labels = tokens.clone()
    if family == "bert":
        labels[torch.rand(labels.shape, generator=generator) < 0.5] = -100
    if family == "t5":
        labels = torch.randint(2, VOCABULARY, (rows, length), generator=generator)
    labels[0] = -100  # so that of four micro-batches the first counts no label
    return {"input_ids": tokens.to(device), "labels": labels.to(device)}
