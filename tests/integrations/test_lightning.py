"""Lightning's Trainer and Fabric with strategy="unbounded", compared with their own strategies."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.launched import launched
from tests.ranks import RankError

lightning = pytest.importorskip("lightning")

PRELOAD_IN_RANKS = ["lightning", "unbounded.lightning"]


class Net(lightning.LightningModule):
    """Blocks, and layers outside of them; its step calls its parts, or itself."""

    def __init__(self, calls_itself: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.save_hyperparameters()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(8, 3)
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)

    def _loss(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        if self.hparams["calls_itself"]:
            logits = self(inputs)
        else:
            logits = self.last(self.blocks[1](self.blocks[0](self.first(inputs))))
        return nn.functional.cross_entropy(logits.float(), labels)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.seen.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self._loss(batch), sync_dist=True)

    def on_validation_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(rank: int = 0) -> Any:
    """Different rows on every rank; four batches make an epoch."""
    generator = torch.Generator().manual_seed(7 + rank)
    rows = torch.randn(8, 5, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=2)


def make_trainer(
    folder: str, world_size: int, strategy: Any, save_last: bool | None = None, callbacks: Any = (), **options: Any
) -> Any:
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch.callbacks import ModelCheckpoint

    return lightning.Trainer(
        default_root_dir=folder,
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        plugins=[LightningEnvironment()],
        callbacks=[
            *callbacks,
            ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1, filename="{step}", save_last=save_last),
        ],
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **{
            "num_sanity_val_steps": 1,
            "max_steps": 4,
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.5,
            "val_check_interval": 4,
            **options,
        },
    )


def compare(rank: int, world_size: int, tiers: list[tuple[str, bool]], folder: str) -> Any:
    """For each tier, with steps that call the module or its parts: plain, ours, ours resumed, both fitted again."""
    import unbounded.lightning

    warnings.simplefilter("ignore")
    with launched(rank, world_size):
        data, theirs = loader(rank), "ddp" if world_size > 1 else "auto"
        references: dict[bool, Any] = {}
        for calls_itself in {one for _, one in tiers}:
            plain = references[calls_itself] = Net(calls_itself)
            make_trainer(f"{folder}/plain", world_size, theirs).fit(plain, data, data)
            make_trainer(f"{folder}/plain2", world_size, theirs, max_steps=2).fit(plain, data)
        found = []
        for tier, calls_itself in tiers:
            plan = {"weights": tier, "optimizer": tier, "gradients": tier, "disk_path": folder}
            place, ours = f"{folder}/{tier}", Net(calls_itself)
            trainer = make_trainer(place, world_size, unbounded.lightning.UnboundedStrategy(plan))
            trainer.fit(ours, data, data)
            again, strategy = Net(calls_itself), unbounded.lightning.UnboundedStrategy(plan)
            resumed = make_trainer(place, world_size, strategy, num_sanity_val_steps=0)
            resumed.fit(again, data, data, ckpt_path=f"{place}/step=2.ckpt")
            tested = trainer.validate(ours, data, verbose=False)
            ours.seen, first = [], ours.seen
            strategy = unbounded.lightning.UnboundedStrategy(plan)
            make_trainer(f"{place}2", world_size, strategy, max_steps=2).fit(ours, data)
            weights, wanted = ours.state_dict(), references[calls_itself].state_dict()
            same = all(torch.allclose(weights[name], value.cpu(), atol=1e-6) for name, value in wanted.items())
            found.append((references[calls_itself].seen, first, again.seen, same, tested, ours.seen))
        return found


@pytest.mark.parametrize(
    ("world_size", "tiers"),
    [(1, [("device", True), ("disk", False)]), (2, [("device", False), ("disk", True)])],
)
def test_trainer_trains_validates_resumes_and_fits_again_as_the_plain_one(
    ranks: Any, tmp_path: Path, world_size: int, tiers: list[tuple[str, bool]]
) -> None:
    results = ranks(world_size, compare, tiers, str(tmp_path))
    for plain, ours, again, same, tested, second in (one for rank in results for one in rank):
        length = len(plain) - len(second)
        assert ours[:length] == pytest.approx(plain[:length], rel=1e-5)
        assert second == pytest.approx(plain[length:], rel=1e-5)
        assert len(second) == 4
        assert again == pytest.approx(ours[length - len(again) : length], rel=1e-6)
        assert same
        assert tested[0]["val"] == pytest.approx(ours[-1], rel=1e-5)
    for tier, _ in tiers:
        saved = tmp_path / tier / "step=2.ckpt"
        assert sorted({path.suffix for path in saved.iterdir()}) == [".bin", ".json"]  # nothing pickled


def take_over(rank: int, world_size: int, folder: str) -> Any:
    """The plain run, and ours from its file half way, with the plain schedule's and optimizer's states."""
    import unbounded.lightning

    warnings.simplefilter("ignore")
    with launched(rank, world_size):
        nets = [Net(), Net()]
        theirs = "ddp" if world_size > 1 else "auto"
        make_trainer(folder, world_size, theirs).fit(nets[0], loader(rank), loader(rank))
        ours = unbounded.lightning.UnboundedStrategy({"weights": "host", "optimizer": "host"})
        trainer = make_trainer(f"{folder}/ours", world_size, ours, num_sanity_val_steps=0)
        trainer.fit(nets[1], loader(rank), loader(rank), ckpt_path=f"{folder}/step=2.ckpt")
        return [net.seen for net in nets]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_of_another_strategy_is_taken_over(ranks: Any, tmp_path: Path, world_size: int) -> None:
    for plain, ours in ranks(world_size, take_over, str(tmp_path)):
        assert 0 < len(ours) < len(plain)
        assert ours == pytest.approx(plain[-len(ours) :], rel=1e-5)


def test_a_callback_that_averages_weights_resumes_with_both(tmp_path: Path) -> None:
    import unbounded.lightning

    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    found = []
    with launched(0, 1):
        for name in ("plain", "ours"):
            folder, nets = f"{tmp_path}/{name}", [Net(), Net()]
            for net, checkpoint in zip(nets, (None, f"{folder}/step=2.ckpt"), strict=True):
                host = {"weights": "host", "optimizer": "host"}
                strategy = "auto" if name == "plain" else unbounded.lightning.UnboundedStrategy(host)
                average = averaging.EMAWeightAveraging(decay=0.5)
                trainer = make_trainer(folder, 1, strategy, callbacks=[average], num_sanity_val_steps=0)
                trainer.fit(net, loader(), loader(), ckpt_path=checkpoint)
            of_average = trainer.validate(nets[1], loader(), ckpt_path=f"{folder}/step=2.ckpt", verbose=False)
            found.append([*nets[0].seen, *nets[1].seen, of_average[0]["val"]])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


class HookedNet(Net):
    """Its hooks look at the weights in a checkpoint, and change some of them or add others."""

    def __init__(self, saves: str, loads: str) -> None:
        super().__init__()
        self.saves, self.loads, self.strict_loading = saves, loads, False
        self.was_read = 0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.was_read += 1
        return super().state_dict(*args, **kwargs)

    def _edit(self, checkpoint: dict[str, Any], how: str) -> None:
        weights = checkpoint["state_dict"]
        if how == "all":
            checkpoint["state_dict"] = {name: value * 0.5 for name, value in weights.items()}
        elif how == "one":
            weights["first.weight"] = weights["first.weight"] + 1
        elif how == "more":
            weights["teacher"] = torch.ones(2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._edit(checkpoint, self.saves)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._edit(checkpoint, self.loads)


def hooked(rank: int, world_size: int, folder: str, saves: str, loads: str) -> Any:
    """The losses of a run and of the one that resumes from it, and how often ours gathered weights."""
    import unbounded.lightning  # noqa: F401

    warnings.simplefilter("ignore")
    found = []
    with launched(rank, world_size):
        for name in ("ddp" if world_size > 1 else "auto", "unbounded"):
            nets = [HookedNet(saves, loads), HookedNet(saves, loads)]
            for net, checkpoint in zip(nets, (None, f"{folder}/{name}/step=2.ckpt"), strict=True):
                trainer = make_trainer(f"{folder}/{name}", world_size, name, num_sanity_val_steps=0)
                trainer.fit(net, loader(rank), loader(rank), ckpt_path=checkpoint)
            found.append([*nets[0].seen, *nets[1].seen])
    return found, nets[0].was_read, nets[1].was_read


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("saves", "loads"), [("", ""), ("all", ""), ("", "all"), ("one", "one"), ("more", "more")])
def test_hooks_that_change_the_weights_in_a_checkpoint_are_heeded(
    ranks: Any, tmp_path: Path, world_size: int, saves: str, loads: str
) -> None:
    for (plain, ours), *was_read in ranks(world_size, hooked, str(tmp_path), saves, loads):
        assert ours == pytest.approx(plain, rel=1e-5)
        assert saves or loads or was_read == [0, 0]


def test_layers_are_synchronised_over_ranks_as_the_trainer_was_asked(tmp_path: Path) -> None:
    import unbounded.lightning

    net = Net(calls_itself=True)
    net.first = nn.Sequential(net.first, nn.BatchNorm1d(8))
    strategy = unbounded.lightning.UnboundedStrategy()
    with launched(0, 1), pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):  # a GPU
        make_trainer(str(tmp_path), 1, strategy, sync_batchnorm=True).fit(net, loader(), loader())


class MortalNet(Net):
    """Killed after its third step, between two saves."""

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def fit(rank: int, world_size: int, folder: str, kind: Any, checkpoint: str | None) -> Any:
    import unbounded.lightning

    warnings.simplefilter("ignore")
    with launched(rank, world_size):
        plan = {"weights": "host", "optimizer": "host", "gradients": "host"}
        strategy, net = unbounded.lightning.UnboundedStrategy(plan), kind()
        trainer = make_trainer(folder, world_size, strategy, save_last=True, num_sanity_val_steps=0)
        trainer.fit(net, loader(rank), loader(rank), ckpt_path=checkpoint)
        return net.seen, net.state_dict()


def test_a_run_that_is_killed_resumes_from_the_last_checkpoint_as_if_it_had_not_been(
    ranks: Any, tmp_path: Path
) -> None:
    whole = ranks(2, fit, f"{tmp_path}/whole", Net, None)
    with pytest.raises(RankError, match="exit code -9"):
        ranks(2, fit, f"{tmp_path}/killed", MortalNet, None)
    resumed = ranks(2, fit, f"{tmp_path}/killed", Net, "last")
    for (seen, weights), (seen_again, its_weights) in zip(whole, resumed, strict=True):
        assert 0 < len(seen_again) < len(seen)
        assert seen_again == seen[-len(seen_again) :]
        assert all(torch.equal(weights[name], value) for name, value in its_weights.items())


class ManualNet(Net):
    """Backwards, clipping and steps of its own, every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer, loss = self.optimizers(), self._loss(batch)
        self.manual_backward(loss / 2)
        if index % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            loss = self._loss(batch)
        self.seen.append(float(loss.detach()))


def optimize_by_hand(rank: int, world_size: int, folder: str) -> Any:
    import unbounded.lightning

    warnings.simplefilter("ignore")
    with launched(rank, world_size):
        nets = [ManualNet(), ManualNet()]
        plan = {"weights": "host", "optimizer": "host"}
        for net, strategy in zip(nets, ("ddp", unbounded.lightning.UnboundedStrategy(plan)), strict=True):
            options = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
            make_trainer(folder, world_size, strategy, **options).fit(net, loader(rank), loader(rank))
        return [net.seen for net in nets]


def test_optimization_by_hand_inside_the_step(ranks: Any, tmp_path: Path) -> None:
    for plain, ours in ranks(2, optimize_by_hand, str(tmp_path)):
        assert ours == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("flag", ["bf16-mixed", "16-mixed"])
def test_precision_flags_become_the_plans(tmp_path: Path, flag: str) -> None:
    import unbounded.lightning

    plain, ours = Net(), Net()
    with launched(0, 1):
        make_trainer(f"{tmp_path}/a", 1, "auto").fit(plain, loader())
        if flag == "16-mixed":  # Lightning itself turns it into bf16 on a CPU
            strategy: Any = unbounded.lightning.UnboundedStrategy({"precision": "fp16", "loss_scale": 256})
            make_trainer(f"{tmp_path}/b", 1, strategy).fit(ours, loader())
        else:
            make_trainer(f"{tmp_path}/b", 1, "unbounded", precision=flag).fit(ours, loader())
    assert ours.first.weight.dtype == {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}[flag]
    assert ours.seen == pytest.approx(plain.seen, rel=2e-2)


def loop(rank: int, world_size: int, strategy: Any, folder: str, precision: Any = None) -> Any:
    """Fabric's loop, a save, and the rest of the loop in new objects."""
    import unbounded.lightning  # noqa: F401

    warnings.simplefilter("ignore")
    with launched(rank, world_size):

        def job() -> Any:
            from lightning.fabric.plugins.environments import LightningEnvironment

            fabric = lightning.Fabric(
                accelerator="cpu", devices=world_size, strategy=strategy, plugins=[LightningEnvironment()],
                precision=precision,
            )  # fmt: skip
            fabric.launch()
            model = Net(calls_itself=True)
            model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            return fabric, model, optimizer

        def train(fabric: Any, model: Any, optimizer: Any, first: int) -> list[float]:
            found = []
            for step in range(first, first + 3):
                generator = torch.Generator().manual_seed(10 * step + rank)
                loss = nn.functional.cross_entropy(
                    model(torch.randn(4, 5, generator=generator)).float(), torch.arange(4) % 3
                )
                fabric.backward(loss)
                found += [float(loss.detach()), float(fabric.clip_gradients(model, optimizer, max_norm=0.5))]
                optimizer.step()
                optimizer.zero_grad()
            return found

        fabric, model, optimizer = job()
        losses = train(fabric, model, optimizer, 0)
        fabric.save(f"{folder}/{strategy}", {"model": model, "optimizer": optimizer, "step": 3})
        losses += train(fabric, model, optimizer, 3)
        fabric, model, optimizer = job()
        state = {"model": model, "optimizer": optimizer, "step": 0}
        fabric.load(f"{folder}/{strategy}", state)
        return losses, train(fabric, model, optimizer, state["step"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_fabric_trains_and_resumes_as_the_plain_one(ranks: Any, tmp_path: Path, world_size: int) -> None:
    plain = ranks(world_size, loop, "ddp" if world_size > 1 else "auto", str(tmp_path))
    ours = ranks(world_size, loop, "unbounded", str(tmp_path))
    for (reference, _), (losses, resumed) in zip(plain, ours, strict=True):
        assert losses == pytest.approx(reference, rel=1e-5)
        assert resumed == pytest.approx(losses[6:], rel=1e-6)


class Order(Net):
    """Notes the labels that it is trained with, and may begin with a checkpoint."""

    def __init__(self, begins_with: str | None = None) -> None:
        super().__init__()
        self.begins_with = begins_with

    def on_fit_start(self) -> None:
        import unbounded

        if self.begins_with is not None:
            unbounded.load(self.begins_with, self, self.trainer.strategy.optimizers[0])
        self.began = self.state_dict()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen += batch[1].tolist()
        return self._loss(batch)


def test_one_rank_keeps_the_order_of_its_loader_and_begins_with_what_save_wrote(tmp_path: Path) -> None:
    import unbounded.lightning

    rows = torch.utils.data.TensorDataset(torch.randn(6, 5), torch.arange(6) % 3)
    ordered, place = torch.utils.data.DataLoader(rows, batch_size=2), str(tmp_path / "saved")
    quiet: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "strategy": "unbounded"}
    options = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False, "max_epochs": 1}

    def fit(model: Order, **given: Any) -> Order:
        lightning.Trainer(default_root_dir=str(tmp_path), **quiet, **options).fit(model, ordered, **given)
        return model

    with launched(0, 1):
        first = fit(Order())
        assert first.seen == [0, 1, 2, 0, 1, 2]
        unbounded.save(place, first, first.trainer.strategy.optimizers[0])
        began, saved = fit(Order(place)).began, first.state_dict()
        assert all(torch.equal(began[name], value) for name, value in saved.items())
        with pytest.raises(
            unbounded.CheckpointError, match=r"saved was not saved by Lightning's .* in .* on_fit_start"
        ):
            fit(Order(), ckpt_path=place)
        fabric = lightning.Fabric(**quiet)
        fabric.launch()
        assert isinstance(fabric.setup_dataloaders(ordered).sampler, torch.utils.data.SequentialSampler)


def test_fabric_loads_weights_from_a_plain_file(tmp_path: Path) -> None:
    import unbounded.lightning

    wanted = {name: value + 1 for name, value in Net().state_dict().items()}
    torch.save(wanted, tmp_path / "weights.pt")
    torch.save({"model": wanted, "step": 3}, tmp_path / "state.pt")
    with launched(0, 1):
        for name in ("weights.pt", "state.pt"):
            fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy="unbounded")
            fabric.launch()
            net = Net()
            model, _ = fabric.setup(net, torch.optim.AdamW(net.parameters()))
            if name == "weights.pt":
                fabric.load_raw(tmp_path / name, model)
            else:
                state = {"model": model, "step": 0}
                fabric.load(tmp_path / name, state)
                assert state["step"] == 3
            assert all(torch.equal(value, wanted[key]) for key, value in net.state_dict().items())
        with pytest.raises(unbounded.PlanError, match="given a filter, but a sharded model is saved whole"):
            fabric.save(tmp_path / "out", {"model": model}, filter={"model": lambda key, value: True})
        fabric.save(tmp_path / "out", {"model": model})
        state = {"model": model, "step": 7}
        with pytest.raises(unbounded.CheckpointError, match=r"names step, which .*out does not have"):
            fabric.load(tmp_path / "out", state)
        assert fabric.load(tmp_path / "out", state, strict=False) == {}
        assert state["step"] == 7
        with pytest.raises(unbounded.CheckpointError, match=r"folder of a sharded model, .* load has none"):
            fabric.load(tmp_path / "out")


def test_what_cannot_be_is_refused_with_what_to_do() -> None:
    import unbounded.lightning

    with pytest.raises(unbounded.PlanError, match="2 optimizers, but only one is supported"):
        unbounded.lightning.precision.only_optimizer([torch.optim.SGD([nn.Parameter(torch.ones(1))])] * 2)
    for strategy in (unbounded.lightning.UnboundedFabricStrategy, unbounded.lightning.UnboundedStrategy):
        with pytest.raises(unbounded.PlanError, match=r"pipeline=2, but .* gives every rank other rows"):
            strategy({"pipeline": 2})
    strategy = unbounded.lightning.UnboundedFabricStrategy()
    with pytest.raises(unbounded.PlanError, match="together"):
        strategy.setup_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    models = {name: strategy.setup_module(nn.Linear(2, 2)) for name in ("one", "other")}
    for call in (strategy.save_checkpoint, strategy.load_checkpoint):
        with pytest.raises(unbounded.PlanError, match="the state has 2 sharded models, and a checkpoint holds one"):
            call("never", models)
