"""What Trainer, Accelerate and Lightning add to a step: each takes turns with our own loop in one run.

    python benchmarks/steps/frameworks.py                                           # a CPU: all three
    python benchmarks/steps/frameworks.py --plain                                   # and what they add to plain PyTorch
    python benchmarks/steps/frameworks.py --size 7b --sequence 2048 --batch 2 --turns 4 \
        --plan device_bytes=24GiB --only trainer

The framework trains a sharded model. After every `--block` of its steps our own loop takes the same model and the same
optimizer for as many, so that both meet the same placement and the same neighbours on the machine. Updates have ended
where the clock is read. Ratios are medians over the turns after the first, of seconds and of the process' CPU time,
which is the one to read on a busy machine without a GPU. A run ends after `--turns`, or after `--seconds`.

`added_cpu_ms` is what the framework's step takes longer, between the quickest turns of both: neighbours can only make a
turn slower. It hardly depends on the size of the model, but its noise does: `--size narrow` has the layers of a real
model and next to no work in them. `--plain` trains the model as it is, beside a loop in plain PyTorch: what the
framework adds then is its own, and ours is what is more than that. With `--epochs` every block of steps is an epoch, in
both loops.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from throughput import SIZES, make_model, make_optimizer

Clock = tuple[float, float]


class Turns:
    """Counts the framework's steps, and runs our own loop between its blocks."""

    def __init__(self, options: argparse.Namespace, model: Any, optimizer: Any) -> None:
        self.options, self.model, self.optimizer = options, model, optimizer
        self.data: Any = list(loader_of(options, options.block))
        if options.epochs:
            self.data = loader_of(options, options.block)
        self.num_steps, self.theirs, self.ours = 0, [], []  # type: int, list[Clock], list[Clock]
        self.began = time.perf_counter()
        self.start = self._clock()

    def step_done(self) -> bool:
        """Called after each step of the framework; returns whether it should end."""
        self.num_steps += 1
        if self.num_steps % self.options.block:
            return False
        self.theirs.append(self._since())
        for batch in self.data:
            self._step(batch)
        self.ours.append(self._since())
        return len(self.ours) > self.options.turns or time.perf_counter() - self.began > self.options.seconds

    def _step(self, batch: dict[str, torch.Tensor]) -> float:
        """Our own loop."""
        self.optimizer.zero_grad()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        loss = self.model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        if self.options.plain:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        else:
            self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def _clock(self) -> Clock:
        if not self.options.plain:
            self.optimizer.wait()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def _since(self) -> Clock:
        now, before = self._clock(), self.start
        self.start = self._clock()
        return now[0] - before[0], now[1] - before[1]

    def report(self, name: str) -> dict[str, Any]:
        """The ratios of a step; the first turn is a warm-up."""
        block, pairs = self.options.block, list(zip(self.theirs, self.ours, strict=True))[1:]
        ratios = [statistics.median(theirs[kind] / ours[kind] for theirs, ours in pairs) for kind in range(2)]
        return {
            "framework": f"{name}, plain" if self.options.plain else name,
            "turns": len(pairs),
            "step_s": round(statistics.median(theirs[0] for theirs, _ in pairs) / block, 4),
            "own_step_s": round(statistics.median(ours[0] for _, ours in pairs) / block, 4),
            "cpu_s": round(statistics.median(theirs[1] for theirs, _ in pairs) / block, 4),
            "own_cpu_s": round(statistics.median(ours[1] for _, ours in pairs) / block, 4),
            "ratio": round(ratios[0], 4),
            "ratio_cpu_time": round(ratios[1], 4),
            "added_cpu_ms": round(1e3 * (min(t[1] for t, _ in pairs) - min(o[1] for _, o in pairs)) / block, 2),
            "of_turns": [round(theirs[0] / ours[0], 3) for theirs, ours in pairs],
            "seconds": round(time.perf_counter() - self.began, 1),
        }


def make(options: argparse.Namespace) -> Any:
    with torch.device("cpu" if options.plain else "meta"):
        return make_model(options).to(torch.bfloat16 if torch.cuda.is_available() else torch.float32).train()


def plan_of(options: argparse.Namespace) -> dict[str, Any]:
    return {
        key: int(value) if value.isdigit() else value for key, value in (pair.split("=", 1) for pair in options.plan)
    }


def rows_of(options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Of one epoch: of a block, or of the whole run."""
    return make_rows(options, options.block if options.epochs else num_steps(options))


def make_rows(options: argparse.Namespace, num_batches: int) -> list[dict[str, torch.Tensor]]:
    size = num_batches * options.batch, options.sequence
    return [{"input_ids": row, "labels": row} for row in torch.randint(0, SIZES[options.size].vocabulary, size)]


def loader_of(options: argparse.Namespace, num_batches: int) -> Any:
    rows = make_rows(options, num_batches)
    return torch.utils.data.DataLoader(rows, batch_size=options.batch, shuffle=True)  # type: ignore[arg-type]


def num_steps(options: argparse.Namespace) -> int:
    return int(options.block * (options.turns + 1))


def run_trainer(options: argparse.Namespace, folder: str) -> Turns:
    import transformers

    import unbounded.hf

    found: list[Turns] = []

    class Callback(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            optimizer = trainer.optimizer.optimizer
            found.append(Turns(options, trainer.model, optimizer))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = found[0].step_done()

    arguments = transformers.TrainingArguments(
        folder,
        max_steps=num_steps(options),
        per_device_train_batch_size=options.batch,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    kind = transformers.Trainer if options.plain else unbounded.hf.Trainer
    trainer = kind(
        model=make(options),
        args=arguments,
        train_dataset=rows_of(options),
        callbacks=[Callback()],
        **({} if options.plain else {"plan": plan_of(options) or "auto"}),
    )
    trainer.train()
    return found[0]


def run_accelerate(options: argparse.Namespace, folder: str) -> Turns:
    from accelerate import Accelerator

    import unbounded.hf

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = make(options)
    optimizer = make_optimizer(model.parameters())
    if not options.plain:
        unbounded.hf.attach(accelerator)
        model, optimizer = unbounded.shard(model, optimizer, plan_of(options) or "auto")
    turns = Turns(options, model, optimizer)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader = loader_of(options, options.block if options.epochs else num_steps(options))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in itertools.chain.from_iterable(loader for _ in range(options.turns + 1 if options.epochs else 1)):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        float(loss.detach())
        if turns.step_done():
            break
    return turns


def run_lightning(options: argparse.Namespace, folder: str) -> Turns:
    import lightning

    import unbounded.lightning

    found: list[Turns] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make(options)

        def forward(self, **batch: Any) -> Any:
            return self.inner(**batch)

        def training_step(self, batch: Any, index: int) -> Any:
            return self(**batch).loss

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.parameters())

    class Callback(lightning.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            found.append(Turns(options, module, trainer.strategy.optimizers[0]))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            trainer.should_stop = found[0].step_done()

    trainer = lightning.Trainer(
        default_root_dir=folder,
        strategy="auto" if options.plain else unbounded.lightning.UnboundedStrategy(plan_of(options) or "auto"),
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        max_steps=num_steps(options),
        gradient_clip_val=1.0,
        callbacks=[Callback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader_of(options, options.block if options.epochs else num_steps(options)))
    return found[0]


RUNS: dict[str, Callable[[argparse.Namespace, str], Turns]] = {
    "trainer": run_trainer,
    "accelerate": run_accelerate,
    "lightning": run_lightning,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--plan", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--block", type=int, default=3, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=5, help="after the first, which warms up")
    parser.add_argument("--plain", action="store_true", help="the plain model beside a plain loop")
    parser.add_argument("--epochs", action="store_true", help="an epoch every block of steps")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each framework, from its first step on")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            report = RUNS[name](options, folder).report(name)
            report |= {"size": options.size, "plan": options.plan, "in_all_s": round(time.perf_counter() - start, 1)}
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
