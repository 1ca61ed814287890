"""What cannot work is the same clear error on every rank, before any of them waits for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.parallel import models
from tests.parallel.comparing import optimizer_of

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def refusal(rank: int, size: int, family: str, plan: dict[str, Any], changes: dict[str, Any], call: bool) -> str:
    kind, _, family = family.rpartition(" ")
    model: Any = Flat() if family == "flat" else models.build(family, **changes)
    if kind == "tiled":
        unbounded.tile(model, 1536)
    optimizer = torch.optim.Adafactor(model.parameters()) if kind == "adafactor" else optimizer_of(model)
    plan = {key: value[rank] if isinstance(value, dict) and rank in value else value for key, value in plan.items()}
    try:
        model, _ = unbounded.shard(model, optimizer, plan)
        if call and "pipeline" in plan:
            unbounded.pipeline(model)(**models.batch("gpt2", 0))
        elif call:
            model(**models.batch("gpt2", 0, length=7))
    except unbounded.UnboundedError as error:
        return str(error)
    return "nothing was refused"


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool, str]] = {
    "mesh": ("gpt2", {"tensor": 3}, {}, False, "tensor=3 needs 3 ranks"),
    "heads": (
        "gpt2",
        {"tensor": 2},
        {"n_head": 1},
        False,
        "the 1 heads of 'transformer.h.0.attn.c_attn'",
    ),
    "query heads": (
        "llama",
        {"tensor": 2},
        {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 12},
        False,
        "the 3 heads of 'model.layers.0.self_attn.q_proj' do not divide over tensor=2",
    ),
    "features": ("llama", {"tensor": 2}, {"intermediate_size": 25}, False, "the 25 features of"),
    "no plan": ("flat", {"tensor": 2}, {}, False, "Flat has no tensor-parallel plan"),
    "no such layer": (
        "flat",
        {"tensor": 2, "styles": (("uq", "column"),)},
        {},
        False,
        "no layer of Flat matches the tensor styles",
    ),
    "style": ("flat", {"tensor": 2, "styles": (("up", "colum"),)}, {}, False, "Did you mean 'column'?"),
    "sequence alone": ("gpt2", {"sequence": True}, {}, False, "sequence without a tensor axis"),
    "tiles and tensor": ("tiled llama", {"tensor": 2}, {}, False, "layers of the model are tiled"),
    "tiles and pipeline": ("tiled llama", {"pipeline": 2}, {}, False, "layers of the model are tiled"),
    "tiles and context": ("tiled llama", {"context": 2}, {}, False, "Leave out unbounded.tile"),
    "whole tensors": ("adafactor llama", {"tensor": 2}, {}, False, "but the plan cuts it over the tensor axis"),
    "odd sequence": ("gpt2", {"tensor": 2, "sequence": True}, {}, True, "7 tokens, which do not divide over tensor=2"),
    "cannot be cut": ("flat", {"pipeline": 2}, {}, False, "Flat has no list of repeated blocks"),
    "too few blocks": ("gpt2", {"pipeline": 2}, {"n_layer": 1}, False, "1 blocks (in 'transformer.h'), too few for 2"),
    "too few": ("gpt2", {"pipeline": 2, "microbatches": 1}, {}, False, "microbatches=1 are too few"),
    "odd number": (
        "gpt2",
        {"pipeline": 2, "microbatches": 3, "schedule": "interleaved"},
        {},
        False,
        "do not divide by",
    ),
    "rows": ("gpt2", {"pipeline": 2, "microbatches": 3}, {}, True, "4 rows, which do not divide into microbatches=3"),
    "schedule": ("gpt2", {"pipeline": 2, "schedule": "1fib"}, {}, False, "Did you mean '1f1b'?"),
    "halves": (
        "gpt2",
        {"pipeline": 2, "schedule": "zero_bubble", "activations": "recompute"},
        {},
        False,
        "zero_bubble' splits backwards",
    ),
    "routing over stages": (
        "mixtral",
        {"pipeline": 2},
        {"output_router_logits": True},
        True,
        "output_router_logits=True asks for a value of every block, but a rank has only some of it with pipeline=2",
    ),
    "routing of parts": (
        "mixtral",
        {"context": 2},
        {"output_router_logits": True},
        True,
        "output_router_logits=True asks for a value of every block, but a rank has only some of it with context=2",
    ),
    "hidden states of parts": (
        "llama",
        {"tensor": 2, "sequence": True},
        {"output_hidden_states": True},
        True,
        "output_hidden_states=True asks for a value of every block, but a rank has only some of it with sequence=True",
    ),
    "attentions of some heads": (
        "llama",
        {"tensor": 2},
        {"attn_implementation": "eager", "output_attentions": True},
        True,
        "output_attentions=True asks for a value of every block, but a rank has only some of it with tensor=2",
    ),
    "ranks disagree": ("gpt2", {"tensor": {0: 2, 1: 1}}, {}, False, "rank 1 has a different plan from rank 0"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_refuses_alike(ranks: Any, case: str) -> None:
    family, plan, changes, call, wanted = CASES[case]
    for message in ranks(2, refusal, family, plan, changes, call):
        assert wanted in message
