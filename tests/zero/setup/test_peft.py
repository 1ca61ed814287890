"""LoRA through `peft`: only the adapters are trained, and only they cost optimizer memory."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unbounded
from tests.zero.training import Batch, Task, assert_parity, shard, train_both

PRELOAD_IN_RANKS = ("transformers.modeling_utils", "peft")
SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Lora(Task):
    """Adapters on the attention of a tiny Llama."""

    def model(self) -> nn.Module:
        import peft
        import transformers

        config = transformers.LlamaConfig(**SIZES, num_hidden_layers=3)
        adapters = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        return peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens = batch.tokens()
        return model(input_ids=tokens, labels=tokens).loss


class LoraAgainstItsBase(Lora):
    """The model without its adapters is the reference in every step, as in preference tuning."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens = batch.tokens()
        with torch.no_grad(), model.disable_adapter():
            reference = model(input_ids=tokens).logits
        return (model(input_ids=tokens).logits - reference - 1).square().mean()


class LoraWithHead(Lora):
    """Adapters, and the head trained in full beside them."""

    def model(self) -> nn.Module:
        model = super().model()
        model.base_model.model.lm_head.requires_grad_(True)
        return model


class LoraRecomputed(Lora):
    """With the model's own gradient checkpointing, where no input of the first block wants a gradient."""

    def model(self) -> nn.Module:
        model = super().model()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model


class LoraOnExperts(Lora):
    """Adapters on parameters that hold all experts, which peft registers anew as parametrizations in every forward."""

    def model(self) -> nn.Module:
        import peft
        import transformers

        config = transformers.MixtralConfig(**SIZES, num_hidden_layers=2, num_local_experts=3)
        names = ["experts.gate_up_proj", "experts.down_proj"]
        adapters = peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=names)
        return peft.get_peft_model(transformers.MixtralForCausalLM(config), adapters)


TASKS = [Lora(), LoraAgainstItsBase(), LoraWithHead(), LoraRecomputed(), LoraOnExperts()]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 2), (2, 3)])
def test_adapters_train_as_in_plain_pytorch(ranks: Any, task: Task, world_size: int, stage: int) -> None:
    assert_parity(ranks(world_size, train_both, task, {"stage": stage}))


def adapter_state(rank: int, world_size: int) -> tuple[list[str], list[str], bool]:
    import peft

    task = Lora()
    model = task.model()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    model, optimizer = shard(model, task.optimizer(model), {"stage": 3})
    task.loss(model, Batch(0, 0, rank)).backward()
    optimizer.step()
    after = [name for name, p in model.named_parameters() if p.requires_grad]
    saved = peft.get_peft_model_state_dict(model)
    moved = any(float(value.abs().sum()) > 0 for name, value in saved.items() if "lora_B" in name)
    return names, after, moved


def test_adapters_can_be_read_with_pefts_own_function(ranks: Any) -> None:
    for before, after, moved in ranks(2, adapter_state):
        assert before == after
        assert moved


def adapt_ranks(rank: int, world_size: int, plan: dict[str, Any] | None) -> list[float]:
    """AdaLoRA: between steps peft reads gradients, prunes singular values and has the model's ranks shrink.

    Several processes have weights and gradients whole inside full_params.
    """
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    adapters = peft.AdaLoraConfig(
        init_r=6, target_r=3, tinit=2, tfinal=3, deltaT=1, total_step=10, target_modules=["q_proj", "v_proj"]
    )
    model: Any = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if plan is not None:
        model, optimizer = shard(model, optimizer, plan)
    losses = []
    for step in range(10):
        tokens = torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        with unbounded.full_params(model) if world_size > 1 else contextlib.nullcontext():
            model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


TIERS = {tier: dict.fromkeys(("weights", "gradients", "optimizer"), tier) for tier in ("device", "host", "disk")}


@pytest.mark.every_second
@pytest.mark.parametrize(
    ("world_size", "plan"),
    [
        *((1, plan) for plan in TIERS.values()),
        (2, {"stage": 0}),
        (2, {"stage": 1}),
        (2, {"stage": 2, "gradients": "host", "optimizer": "host"}),
        (2, {"stage": 3, **TIERS["disk"]}),
    ],
    ids=str,
)
def test_adapters_whose_ranks_shrink_while_they_train_do_so_as_in_plain_pytorch(
    ranks: Any, world_size: int, plan: dict[str, Any]
) -> None:
    for losses in ranks(world_size, adapt_ranks, plan):
        assert losses == pytest.approx(adapt_ranks(0, 1, None), rel=1e-5)
