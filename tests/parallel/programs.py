"""Random programs over the parallel axes against plain PyTorch: `python -m tests.parallel.programs FIRST LAST`.

Each program (one per seed) draws a model, a mesh, a plan and a loop of steps with evaluations, edits, freezing, hooks,
checkpoints that go on under another mesh, and so on. Losses, norms, gradients and weights must be those of one process.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
import time
import traceback
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tests.ranks
import unbounded
from tests.parallel import models
from tests.parallel.comparing import without_dropout
from tests.ranks import RankError, close_ranks, run_ranks

Spec = dict[str, Any]


class Block(nn.Module):
    """Attention and a perceptron in a stranger's hand."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        width, self.head = spec["width"], spec["width"] // spec["heads"]
        self.fused, self.dropout = spec["fused"], spec["dropout"]
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width, elementwise_affine=spec["affine"])
        if self.fused:
            self.qkv = nn.Linear(width, 3 * width, bias=spec["bias"])
        else:
            self.q, self.k, self.v = (nn.Linear(width, width, bias=spec["bias"]) for _ in range(3))
        self.out = nn.Linear(width, width, bias=spec["bias"])
        self.up, self.down = nn.Linear(width, spec["inner"]), nn.Linear(spec["inner"], width)
        self.gain = nn.Parameter(torch.tensor(0.7)) if spec["gain"] else None
        self.never = nn.Linear(3, 5) if spec["never"] else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = self.qkv(y).chunk(3, -1) if self.fused else (self.q(y), self.k(y), self.v(y))
        q, k, v = (t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), self.dropout, self.training)
        y = self.down(F.gelu(self.up(self.norm2(x))))
        return x + (y if self.gain is None else y * self.gain)


class Mine(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.words, self.places = nn.Embedding(spec["vocabulary"], spec["width"]), nn.Embedding(32, spec["width"])
        if spec["list"] == "sequential":
            self.blocks: Any = nn.Sequential(*[Block(spec) for _ in range(spec["depth"])])
        else:
            self.blocks = nn.ModuleList(Block(spec) for _ in range(spec["depth"]))
        self.norm = nn.LayerNorm(spec["width"])
        self.head = nn.Linear(spec["width"], spec["vocabulary"], bias=spec["head_bias"] and not spec["tied"])
        if spec["tied"]:
            self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        if self.spec["list"] == "sequential":
            x = self.blocks(x)
        else:
            for block in self.blocks:
                x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return {"loss": loss, "logits": logits}


HF = ("gpt2", "llama", "qwen3", "mixtral", "bert", "t5", "opt", "olmo2", "phi3")


def draw_model(draw: random.Random) -> Spec:
    if draw.random() < 0.5:
        heads = draw.choice((4, 4, 8))
        return {
            "kind": "mine",
            "heads": heads,
            "width": heads * draw.choice((2, 3, 5)),
            "inner": draw.choice((8, 12, 20, 36)),
            "depth": draw.choice((4, 5, 6, 7)),
            "vocabulary": draw.choice((17, 23, 32, 61)),
            **{name: draw.random() < 0.5 for name in ("tied", "bias", "head_bias", "gain", "never", "fused", "affine")},
            "dropout": draw.choice((0.0, 0.0, 0.2)),
            "list": draw.choice(("list", "sequential")),
        }
    family = draw.choice(HF)
    changes: Spec = {}
    depth = draw.choice((4, 5))
    if family == "gpt2":
        changes["n_layer"] = depth
    elif family == "t5":
        changes["num_layers"] = draw.choice((2, 3))
    else:
        changes["num_hidden_layers"] = depth
    if family in ("llama", "qwen3", "mixtral", "olmo2", "phi3", "gpt2", "t5"):
        changes["tie_word_embeddings"] = draw.random() < 0.5
    if family in ("llama", "phi3", "olmo2"):
        changes["num_key_value_heads"] = draw.choice((1, 2, 4))
    if family == "llama":
        changes["mlp_bias"] = draw.random() < 0.5
    lora = family in ("llama", "qwen3", "gpt2", "opt", "mixtral") and draw.random() < 0.35
    return {"kind": family, "changes": changes, "lora": lora, "dropout": draw.choice((0, 1))}


def build(spec: Spec, seed: int, *, drops: bool) -> nn.Module:
    torch.manual_seed(seed)
    if spec["kind"] == "mine":
        model: nn.Module = Mine({**spec, "dropout": spec["dropout"] if drops else 0.0})
    else:
        model = models.build(spec["kind"], **spec["changes"])
        if spec["lora"]:
            from peft import LoraConfig, get_peft_model

            names = {
                "gpt2": ["c_attn", "c_proj"],
                "opt": ["q_proj", "v_proj", "fc1", "fc2"],
                "mixtral": ["q_proj", "v_proj", "o_proj"],
            }
            targets = names.get(spec["kind"], ["q_proj", "v_proj", "o_proj", "down_proj"])
            torch.manual_seed(seed)
            model = get_peft_model(
                model, LoraConfig(r=4, target_modules=targets, fan_in_fan_out=spec["kind"] == "gpt2")
            )
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.data.normal_(std=0.1)
        if not drops or not spec["dropout"]:
            without_dropout(model)
    for prefix in spec.get("frozen", ()):
        for name, parameter in model.named_parameters():
            if prefix in name:
                parameter.requires_grad_(False)
    return model


def styles_of(spec: Spec, draw: random.Random) -> tuple[tuple[str, str], ...]:
    styles: list[tuple[str, str]] = []
    if draw.random() < 0.8:
        names = [("qkv", "column_of_3")] if spec["fused"] else [(n, "column") for n in "qkv"]
        styles += [(f"blocks.*.{name}", style) for name, style in names] + [("blocks.*.out", "row")]
    if draw.random() < 0.8 or not styles:
        styles += [("blocks.*.up", "column"), ("blocks.*.down", "row")]
    if draw.random() < 0.7 or spec["tied"]:
        styles += [("words", "vocabulary"), ("head", "head")]
    return tuple(styles)


def draw_plan(draw: random.Random, spec: Spec, size: int) -> Spec:
    """A mesh of `size` ranks, and where states are."""
    left, plan = size, {}
    axes = ["tensor", "pipeline", "context"]
    draw.shuffle(axes)
    no_context = spec["kind"] == "t5"
    for axis in axes:
        if axis == "context" and no_context:
            continue
        choices = [n for n in (1, 2, 4) if left % n == 0]
        if draw.random() < 0.6:
            plan[axis] = draw.choice(choices)
            left //= plan[axis]
    plan = {axis: n for axis, n in plan.items() if n > 1}
    if plan.get("tensor") and "context" not in plan and draw.random() < 0.4:
        plan["sequence"] = True
    if plan.get("tensor") and spec["kind"] == "mine":
        plan["styles"] = styles_of(spec, draw)
    if plan.get("pipeline"):
        deep = spec.get("depth", 4) >= 2 * plan["pipeline"]
        plan["schedule"] = draw.choice(("gpipe", "1f1b", "zero_bubble", "interleaved" if deep else "1f1b"))
        if draw.random() < 0.6 or plan["schedule"] == "interleaved":
            plan["microbatches"] = draw.choice((plan["pipeline"], 4))
    plan["stage"] = draw.choice((0, 1, 2, 3, 3))
    if plan["stage"] >= 1:
        plan["optimizer"] = draw.choice(("device", "host", "disk"))
        plan["gradients"] = draw.choice(("device", "host", "disk"))
    if plan["stage"] == 3:
        plan["weights"] = draw.choice(("device", "host", "disk"))
    if plan.get("schedule") != "zero_bubble":
        plan["activations"] = draw.choice(("keep", "keep", "recompute", "host"))
    plan["prefetch_units"] = draw.choice((0, 1, 2))
    return plan


OPS = (
    *("eval", "logits", "state_dict", "hop", "hop", "rate", "freeze", "thaw", "edit", "generate", "roundtrip", "ema"),
    *("export", "save", "load", "mode", "hook", "freeze first"),
)


def draw_program(seed: int) -> Spec:
    draw = random.Random(seed)
    size = draw.choice((2, 2, 2, 4, 4))
    spec = draw_model(draw)
    if draw.random() < 0.3:
        spec["frozen"] = draw.sample(["words", "embed", "wte", ".0.", ".1.", "head", "norm", "bias", ".3."], 2)
    plans = [draw_plan(draw, spec, size) for _ in range(3)]
    steps = []
    for _ in range(draw.choice((3, 4, 5))):
        steps.append(
            {
                "backwards": draw.choice((1, 1, 2, 3)),
                "rows": draw.choice((8, 8, 16)),
                "length": draw.choice((8, 8, 12, 4)),
                "no_sync": draw.random() < 0.3,
                "last": draw.random() < 0.2,
                "clip": draw.choice((None, 0.05, 0.3, 100.0)),
                "torch": draw.random() < 0.4,
                "gradients": draw.random() < 0.3,
                "half": draw.random() < 0.15,
                "padded": draw.random() < 0.3,
                "between": [op for op in OPS if draw.random() < 0.1],
            }
        )
    return {
        "seed": seed,
        "size": size,
        "model": spec,
        "plans": plans,
        "optimizer": draw.choice(("adamw", "groups", "sgd", "momentum", "amsgrad", "adagrad")),
        "scheduler": draw.choice((None, "lambda", "cosine", "onecycle")),
        "steps": steps,
    }


def copies_of(size: int, plan: Spec) -> int:
    return size // plan.get("tensor", 1) // plan.get("context", 1) // plan.get("pipeline", 1)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    every = [p for _, p in named]
    if kind == "groups":
        groups = [
            {"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for n, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 5e-3},
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=2e-3, eps=1e-4)
    return {
        "adamw": lambda: torch.optim.AdamW(every, lr=2e-3, eps=1e-4),
        "sgd": lambda: torch.optim.SGD(every, lr=0.05),
        "momentum": lambda: torch.optim.SGD(every, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
        "amsgrad": lambda: torch.optim.Adam(every, lr=2e-3, eps=1e-4, amsgrad=True),
        "adagrad": lambda: torch.optim.Adagrad(every, lr=2e-3, eps=1e-3),
    }[kind]()


def scheduler_of(kind: str | None, optimizer: Any) -> Any:
    if kind == "lambda":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if kind == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    if kind == "onecycle":
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=12, cycle_momentum=False)
    return None


class Run:
    """One of the two runs; `rank` is None in plain PyTorch."""

    def __init__(self, program: Spec, rank: int | None, folder: str = "") -> None:
        self.program, self.rank, self.folder = program, rank, folder
        self.seen: list[tuple[str, Any]] = []
        self.places = {copies_of(program["size"], plan) for plan in program["plans"]}
        self.drops = self.places == {1} and not any("pipeline" in plan for plan in program["plans"])
        self.plan = program["plans"][0]
        self.num_hops = 0
        self.family = program["model"]["kind"]
        self.generator = random.Random(program["seed"])
        self.saved: Any = None
        self.start()

    def start(self) -> None:
        program = self.program
        self.model = build(program["model"], program["seed"], drops=self.drops)
        optimizer = optimizer_of(program["optimizer"], self.model)
        self.optimizer: Any = optimizer
        self.copies = copies_of(program["size"], self.plan)
        if self.rank is not None:
            self.model, self.optimizer = unbounded.shard(self.model, optimizer, self.plan)
            axes = self.optimizer.engine.axes
            self.place = axes.data.rank
            self.pipeline = None
            if axes.pipeline.size > 1:
                self.pipeline = unbounded.pipeline(self.model)
        self.scheduler = scheduler_of(program["scheduler"], self.optimizer)

    @property
    def is_ours(self) -> bool:
        return self.rank is not None

    def batch(self, number: int, micro: int, place: int, step: Spec) -> dict[str, Tensor]:
        vocabulary = self.program["model"].get("vocabulary", models.VOCABULARY)
        generator = torch.Generator().manual_seed(1 + 1000 * number + 10 * micro + place)
        shape = step["rows"], step["length"]
        tokens = torch.randint(2, vocabulary, shape, generator=generator)
        labels = torch.randint(2, vocabulary, shape, generator=generator)
        labels[torch.rand(shape, generator=generator) < 0.3] = -100
        labels[:, 1] = 3
        batch = {"input_ids": tokens, "labels": labels}
        if step["padded"] and self.family not in ("mine", "t5", "bert"):
            mask = torch.ones(shape, dtype=torch.long)
            mask[::2, -2:] = 0
            labels[::2, -2:] = -100
            batch["attention_mask"] = mask
        return batch

    def run(self) -> list[tuple[str, Any]]:
        torch.manual_seed(11)
        for number, step in enumerate(self.program["steps"]):
            self.step(number, step)
            for op in step["between"]:
                getattr(self, op.replace(" ", "_"))(number, step)
        self.note("end", self.weights())
        return self.seen

    def note(self, label: str, value: Any) -> None:
        self.seen.append((label, value))

    def step(self, number: int, step: Spec) -> None:
        for micro in range(step["backwards"]):
            losses = []
            is_last = micro == step["backwards"] - 1
            if not self.is_ours:
                for place in range(self.copies):
                    loss = self.model(**self.batch(number, micro, place, step))["loss"]
                    (loss / self.copies).backward()
                    losses.append(float(loss.detach()))
            else:
                batch = self.batch(number, micro, self.place, step)
                hints: list[Any] = []
                if step["no_sync"] and not is_last:
                    hints.append(self.optimizer.no_sync())
                if step["last"] and is_last and not self.pipeline and not step["gradients"] and not step["half"]:
                    hints.append(self.optimizer.last_backward(max_norm=step["clip"]))
                for hint in hints:
                    hint.__enter__()
                if self.pipeline is not None:
                    loss = self.pipeline(**batch)
                else:
                    loss = self.model(**batch)["loss"]
                    loss.backward()
                for hint in hints:
                    hint.__exit__(None, None, None)
                losses = {self.place: float(loss.detach())}
            self.note(f"{number}.{micro} loss", losses)
        if step["gradients"]:
            self.note(f"{number} gradients", self.gradients())
        if step["half"]:
            self.halve()
        if step["clip"] is not None:
            if self.is_ours and not (step["torch"] and self.pipeline is None):
                norm = self.optimizer.clip_grad_norm_(step["clip"])
            else:
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), step["clip"])
            self.note(f"{number} norm", float(norm))
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Any]:
        if not self.is_ours:
            return {n: None if p.grad is None else p.grad.clone() for n, p in self.model.named_parameters()}
        with unbounded.full_params(self.model):
            return {n: None if p.grad is None else p.grad.clone() for n, p in self.model.named_parameters()}

    def halve(self) -> None:
        for name, p in self.model.named_parameters():
            if len(name) % 2 and p.grad is not None:
                p.grad.mul_(0.5)

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().float().clone() for name, value in self.model.state_dict().items()}

    # -- between steps -------------------------------------------------------------------------------------------------

    def eval(self, number: int, step: Spec) -> None:
        self.model.eval()
        with torch.no_grad():
            batch = self.batch(number, 7, 0, step)
            if self.is_ours and self.pipeline is not None and number % 2:
                loss = self.pipeline(**batch)
            else:
                loss = self.model(**batch)["loss"]
            self.note(f"{number} eval", float(loss))
        self.model.train()

    def logits(self, number: int, step: Spec) -> None:
        self.model.eval()
        with torch.no_grad():
            batch = self.batch(number, 8, 0, {**step, "rows": 3, "length": 7})
            if self.family != "t5":
                batch.pop("labels")
            self.note(f"{number} logits", {"logits": self.model(**batch)["logits"].clone()})
        self.model.train()

    def generate(self, number: int, step: Spec) -> None:
        if self.family in ("mine", "bert", "t5"):
            return
        options: Spec = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        if self.is_ours and (self.pipeline is not None or self.plan.get("context")):
            options["use_cache"] = False
        self.model.eval()
        tokens = self.batch(number, 9, 0, {**step, "rows": 2, "length": 5, "padded": False})["input_ids"]
        with torch.no_grad():
            out = self.model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options)
        self.note(f"{number} generated", {"tokens": out.float()})
        self.model.train()

    def state_dict(self, number: int, step: Spec) -> None:
        self.note(f"{number} weights", self.weights())

    def rate(self, number: int, step: Spec) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def _set(self, words: tuple[str, ...], trains: bool) -> None:
        frozen = self.program["model"].get("frozen", ())
        lora = self.program["model"].get("lora")
        for name, p in self.model.named_parameters():
            meant = any(word in name for word in words) and not any(word in name for word in frozen)
            if meant and (not lora or "lora" in name):
                p.requires_grad_(trains)

    def freeze(self, number: int, step: Spec) -> None:
        self._set((".1.", "norm", "head"), False)

    def freeze_first(self, number: int, step: Spec) -> None:
        self._set(("words", "places", "wte", "wpe", "embed", ".0.", ".1.", "shared"), False)

    def thaw(self, number: int, step: Spec) -> None:
        self._set((".0.", ".1.", "norm", "head", "words", "places", "wte", "wpe", "embed", "shared"), True)

    @torch.no_grad()
    def edit(self, number: int, step: Spec) -> None:
        def write() -> None:
            for name, p in self.model.named_parameters():
                if sum(map(ord, name)) % 3 == 0:
                    p.mul_(0.9)

        if self.is_ours:
            with unbounded.full_params(self.model):
                write()
        else:
            write()

    def roundtrip(self, number: int, step: Spec) -> None:
        state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        for value in state.values():
            if value.is_floating_point():
                value.mul_(0.95)
        self.model.load_state_dict(state)

    def ema(self, number: int, step: Spec) -> None:
        before = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        average = {n: (v * 0.9 if v.is_floating_point() else v) for n, v in before.items()}
        self.model.load_state_dict(average)
        self.eval(number, step)
        self.model.load_state_dict(before)

    def mode(self, number: int, step: Spec) -> None:
        """A training forward that is never followed by a backward."""
        batch = self.batch(number, 6, 0, step)
        batch = {name: batch[name][:, :4].contiguous() for name in ("input_ids", "labels")}
        if self.is_ours and self.pipeline is not None:
            with torch.no_grad():
                self.note(f"{number} forward", float(self.pipeline(**batch)))
        elif self.is_ours:
            self.note(f"{number} forward", float(self.model(**batch)["loss"]))
        else:
            with torch.no_grad():
                self.note(f"{number} forward", float(self.model(**batch)["loss"]))

    def hook(self, number: int, step: Spec) -> None:
        for name, p in self.model.named_parameters():
            if sum(map(ord, name)) % 4 == 0 and p.requires_grad:
                p.register_hook(lambda g: g * 1.5)

    def export(self, number: int, step: Spec) -> None:
        if not self.is_ours:
            self.note(f"{number} exported", self.weights())
            return
        from safetensors.torch import load_file

        if self.program["model"].get("lora"):
            self.note(f"{number} exported", self.weights())
            return
        path = f"{self.folder}/export{number}"
        unbounded.export(path, self.model)
        import glob

        found: dict[str, Tensor] = {}
        for file in glob.glob(f"{path}/*.safetensors"):
            found |= load_file(file)
        own = self.weights()
        self.note(f"{number} exported", {name: found.get(name, own[name]).float() for name in own})

    def save(self, number: int, step: Spec) -> None:
        extra = self.scheduler.state_dict() if self.scheduler is not None else None
        if self.is_ours:
            unbounded.save(f"{self.folder}/saved", self.model, self.optimizer, scheduler=extra)
            self.saved = True
        else:
            states = self.model.state_dict(), self.optimizer.state_dict(), extra
            self.saved = *copy.deepcopy(states), torch.get_rng_state()

    def load(self, number: int, step: Spec) -> None:
        if self.saved is None:
            return
        if self.is_ours:
            extra = unbounded.load(f"{self.folder}/saved", self.model, self.optimizer)["scheduler"]
        else:
            weights, states, extra, random_state = copy.deepcopy(self.saved)
            torch.set_rng_state(random_state)
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(states)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(extra)

    def hop(self, number: int, step: Spec) -> None:
        """Goes on in a new job with another plan."""
        self.num_hops += 1
        self.plan = self.program["plans"][self.num_hops % 3]
        random_state = torch.get_rng_state()
        if not self.is_ours:
            self.copies = copies_of(self.program["size"], self.plan)
            before = self.model, self.optimizer, self.scheduler
            self.start()
            self.model.load_state_dict(before[0].state_dict())
            self.optimizer.load_state_dict(before[1].state_dict())
            if self.scheduler is not None:
                self.scheduler.load_state_dict(before[2].state_dict())
            torch.set_rng_state(random_state)
            return
        extra = self.scheduler.state_dict() if self.scheduler is not None else None
        path = f"{self.folder}/hop{self.num_hops}"
        unbounded.save(path, self.model, self.optimizer, scheduler=extra)
        del self.model, self.optimizer, self.pipeline
        self.start()
        told = unbounded.load(path, self.model, self.optimizer)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(told["scheduler"])
        torch.set_rng_state(random_state)


def run_ours(rank: int, size: int, program: Spec, folder: str) -> tuple[str, Any]:
    try:
        return "seen", Run(program, rank, folder).run()
    except unbounded.UnboundedError as error:
        where = [f for f in traceback.extract_tb(error.__traceback__) if "programs" in f.filename][-1]
        return "refused", f"{type(error).__name__} at {where.name} ({where.lineno}): {error}"


def differences(expected: Any, found: Any, rank: int) -> list[str]:
    if [label for label, _ in expected] != [label for label, _ in found]:
        return ["another order of events"]
    wrong = []
    for (label, wanted), (_, got) in zip(expected, found, strict=True):
        if isinstance(wanted, list):
            ((place, value),) = got.items()
            if not abs(value - wanted[place]) <= 2e-4 * max(abs(wanted[place]), 0.1):
                wrong.append(f"{label}: {value} instead of {wanted[place]}")
        elif isinstance(wanted, float):
            if not abs(got - wanted) <= 2e-4 * max(abs(wanted), 0.1):
                wrong.append(f"{label}: {got} instead of {wanted}")
        else:
            if "gradients" not in label and list(wanted) != list(got):
                wrong.append(f"{label}: other names {set(wanted) ^ set(got) or 'order'}")
            for name, value in got.items():
                other = wanted.get(name)
                if (other is None) != (value is None):
                    wrong.append(f"{label}: {name} is {value if value is None else 'a tensor'}")
                elif value is not None and value.shape != other.shape:
                    wrong.append(f"{label}: {name} has {value.shape}")
                elif value is not None:
                    error = float((value - other).norm() / (other.norm() + 1e-3))
                    if not error <= 5e-4:
                        wrong.append(f"{label}: {name} off by {error:.1e}")
    return wrong


def check(program: Spec, run: Any = run_ranks) -> tuple[str, str]:
    """The outcome of a program ("same", "differs", "refused", "broken", ...) and what there is to say of it."""
    try:
        expected = Run(program, None).run()
    except (ValueError, RuntimeError) as error:
        return "no case", str(error)[:300]
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = run(program["size"], run_ours, program, folder, timeout=150.0)
        except RankError as error:
            return "broken", str(error)
    kinds = {kind for kind, _ in results}
    if kinds == {"refused"}:
        texts = [text for _, text in results]
        return ("refused" if len(set(texts)) == 1 else "refused apart"), "\n    ".join(dict.fromkeys(texts))
    if kinds != {"seen"}:
        return "some refused", str([text for kind, text in results if kind == "refused"])
    for rank, (_, found) in enumerate(results):
        wrong = differences(expected, found, rank)
        if wrong:
            return "differs", f"rank {rank}: {wrong[:4]}"
    return "same", ""


def main() -> None:
    torch.set_num_threads(1)
    tests.ranks.PRELOAD.append("transformers.modeling_utils")
    tests.ranks.GRACE_SECONDS = 20.0
    counts: dict[str, int] = {}
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        began = time.monotonic()
        p = draw_program(seed)
        outcome, text = check(p)
        counts[outcome] = counts.get(outcome, 0) + 1
        about = "" if outcome == "same" else f"\n    {p['model']}\n    {p['plans']}"
        seconds, kind = time.monotonic() - began, p["model"]["kind"]
        print(f"{seed} {outcome} ({seconds:.1f} s) {kind} {text[-3500:]}{about}", flush=True)
    print(counts)
    close_ranks()


if __name__ == "__main__":
    main()
