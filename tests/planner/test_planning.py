"""`unbounded.plan` and `unbounded plan`: a plan that `shard` takes, a report, a page, and errors of one line."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unbounded
from tests.ranks import HANG_SECONDS, run_ranks
from tests.zero.drafting import drafting
from unbounded.activations.checkpointed import attached_to
from unbounded.activations.headroom import Headroom
from unbounded.cli import main
from unbounded.cli.plan_page import COLUMNS
from unbounded.errors import BudgetError, PlanError
from unbounded.planner.evaluation import Request, evaluate
from unbounded.planner.machine import VERSION, saved_path
from unbounded.planner.models.footprint import expand, footprint_of
from unbounded.planner.models.rank_parts import find_rank_parts
from unbounded.planner.models.shapes import make_shape
from unbounded.planner.plan import Plan
from unbounded.planner.presets import UNMEASURED, find_machine
from unbounded.planner.step.loads import Setup
from unbounded.planner.step.streaming import stream_rate
from unbounded.planning.running_step import predict_step
from unbounded.sharding import block_policies


class Stack(nn.Module):
    def __init__(self, depth: int = 6, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def make(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Stack(**options)
    return model, torch.optim.AdamW(model.parameters())


def test_a_plan_for_a_module_is_closed_says_why_and_is_what_shard_does() -> None:
    model, _ = make()
    for layer in model.layers:  # each block has a unit that is frozen and one that is not
        layer[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    plan = unbounded.plan(model, optimizer, machine=UNMEASURED, tokens_per_step=64, sequence=16, weights="host")
    assert plan.predicted_seconds is not None
    assert plan.predicted_seconds > 0
    assert "bottleneck" in plan.reasons
    assert "reasons" not in repr(plan)
    placed, stepped = unbounded.shard(model, optimizer, plan)
    placed(torch.randn(4, 64)).square().mean().backward()
    stepped.step()
    assert stepped.plan.weights == plan.weights
    assert stepped.plan.optimizer == plan.optimizer
    assert stepped.plan.activations == plan.activations
    assert "frozen" in str(plan.weights)
    found = predict_step(placed, tokens=64, sequence=16, machine=UNMEASURED)
    assert found is not None
    assert "weights" not in found.held["device"]


def test_compiled_blocks_are_predicted_as_compiled() -> None:
    """If the plan asks for it, if the user has done it, and for a model that is already sharded."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=3, vocab_size=64)
    asked: dict[str, Any] = {"machine": UNMEASURED, "tokens_per_step": 8192, "sequence": 64}

    def seconds(model: Any, **options: Any) -> float:
        return float(unbounded.plan(model, **asked, **options).predicted_seconds or 0.0)

    def build() -> nn.Module:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)

    eager, compiled = seconds(build()), seconds(build(), compile=True)
    assert compiled < eager
    assert seconds(config, precision="fp32", compile=True) == seconds(build(), precision="fp32", compile=True)
    assert seconds(build(), compile="eager") == eager
    model = build()
    for block in model.model.layers:
        block.compile()
    assert seconds(model) == compiled
    predicted = [
        predict_step(unbounded.shard(build(), None, {"compile": how})[0], tokens=8192, sequence=64, machine=UNMEASURED)
        for how in (False, True)
    ]
    assert predicted[1].seconds < predicted[0].seconds  # type: ignore[union-attr]


def test_budgets_of_a_plan_are_kept_and_contradictions_refused() -> None:
    model, optimizer = make(depth=12, width=128)
    plan = unbounded.plan(
        model, optimizer, machine=UNMEASURED, tokens_per_step=64, sequence=16, device_bytes="2MiB", host_bytes="2GiB"
    )
    assert {tier for _, tier in plan.optimizer} > {"host"} or {tier for _, tier in plan.optimizer} == {"host"}
    assert plan.device_bytes == 2 * 2**20
    with pytest.raises(BudgetError, match=r"fits nowhere"):
        unbounded.plan(model, optimizer, machine=UNMEASURED, device_bytes="1KiB", tokens_per_step=64)
    with pytest.raises(PlanError, match=r"stage is '3', but it must be one of 0, 1, 2, 3. Did you mean 3\?"):
        unbounded.plan(model, optimizer, machine=UNMEASURED, stage="3")
    with pytest.raises(PlanError, match=r"no key 'device_byte'. Did you mean 'device_bytes'"):
        unbounded.plan(model, optimizer, machine=UNMEASURED, device_byte=1)
    with pytest.raises(PlanError, match=r"was given a int as the model"):
        unbounded.plan(7, machine=UNMEASURED)


def test_a_field_that_is_none_has_its_default() -> None:
    assert unbounded.Plan(**{item.name: None for item in fields(unbounded.Plan)}) == unbounded.Plan()  # type: ignore[arg-type]


def test_products_in_fp32_take_as_long_as_they_do_on_the_machine() -> None:
    def times(machine: Any) -> float:
        narrow, wide = (unbounded.plan("llama-1b", machine=machine, precision=p) for p in ("bf16", "fp32"))
        return float(wide.predicted_seconds or 0.0) / float(narrow.predicted_seconds or 1.0)

    assert times("h200") > 5  # 67 instead of 989 TFLOP/s
    assert times(replace(find_machine("h200"), fp32_flops=0.0)) < 2  # not known


def test_a_plan_for_a_machine_that_was_not_measured_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assumed = "assumed      rates of an H200 machine: this one was not measured"
    assert assumed in unbounded.plan("gpt2", tokens_per_step=64, sequence=64).reasons
    replace(UNMEASURED, name="measured").save()
    assert "assumed" not in unbounded.plan("gpt2", tokens_per_step=64, sequence=64).reasons


def test_a_shape_a_name_and_a_preset_machine_will_do() -> None:
    plan = unbounded.plan("llama-7b", machine="rtx4090", tokens_per_step=8192)
    assert plan.precision == "bf16"
    assert "rtx4090" in plan.reasons
    with pytest.raises(PlanError, match=r"there is no machine 'rtx4091'. Did you mean"):
        unbounded.plan("llama-7b", machine="rtx4091")
    with pytest.raises(PlanError, match=r"there is no machine file"):
        unbounded.plan("llama-7b", machine="nowhere/machine.json")


def test_a_sharded_model_is_predicted_only_with_a_measured_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, optimizer = make()
    unbounded.shard(model, optimizer, {"optimizer": "host", "weights": "host"})
    assert predict_step(model, tokens=64, sequence=16) is None
    UNMEASURED.save()
    once, twice = (predict_step(model, tokens=64, sequence=16, accumulate=count) for count in (1, 2))
    assert once is not None
    assert twice is not None
    assert once.held["host"]["optimizer"] == pytest.approx(8 * sum(p.numel() for p in model.parameters()), rel=0.05)
    assert twice.seconds > once.seconds
    adds_slowly = replace(UNMEASURED, host_add_rate=UNMEASURED.host_rate / 1e6)
    slow = predict_step(model, tokens=64, sequence=16, accumulate=2, machine=adds_slowly)
    assert slow is not None
    assert slow.seconds > 2 * twice.seconds
    saved_path().write_text(UNMEASURED.to_json().replace(f'"version": {VERSION}', f'"version": {VERSION - 1}'))
    assert predict_step(model, tokens=64, sequence=16) is None


def host_seconds(prediction: Any) -> list[float]:
    return [prediction.lane(phase, "host memory") for phase in ("first forward", "backward")]


def test_a_plan_has_moments_updated_in_the_backward_where_that_is_shorter() -> None:
    footprint = footprint_of(make_shape(layers=24, hidden=2048))
    places = Plan(weights="host", gradients="host", optimizer="host")
    numel = sum(part.numel for part in expand(footprint.parts))
    for tokens, is_hidden in ((2**15, True), (2**10, False)):
        setup, request = Setup(tokens=tokens, logits_tile_bytes=2**28), Request(tokens, plan=places)
        parts, whole = (
            evaluate(footprint, UNMEASURED, setup, "exact", replace(request, updates_in_parts=in_parts))
            for in_parts in (True, False)
        )
        assert parts is not None
        assert whole is not None
        (before, before_back), (now, now_back) = host_seconds(whole.prediction), host_seconds(parts.prediction)
        saved, added = before - now, now_back - before_back
        assert added == pytest.approx(saved * 18 / 8)  # the moments are read and written again, and the gradient read
        assert parts.seconds <= whole.seconds
        all_seconds = numel * 8 / (UNMEASURED.update_rate("exact") + stream_rate(UNMEASURED))
        assert saved == pytest.approx(all_seconds, rel=0.02) if is_hidden else 0 <= saved < 0.5 * all_seconds


@pytest.mark.parametrize("states", [True, False])
def test_updates_begin_in_the_backward_of_a_step_that_does_not_clip(states: bool) -> None:
    passes_are_long = replace(UNMEASURED, host_thread_rate=2e6, host_bandwidth=2e6, kernel_seconds=1e-3)
    passes_are_short = replace(passes_are_long, kernel_seconds=0.0)
    with drafting(states=states):
        model, optimizer = make()
        model, optimizer = unbounded.shard(
            model, optimizer, {"optimizer": "host", "weights": "host", "early_units": 99}
        )

        def predict(machine: Any, *, max_norm: float) -> Any:
            for _ in range(3):
                model(torch.randn(4, 64)).square().mean().backward()
                optimizer.clip_grad_norm_(max_norm)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.wait()
            return predict_step(model, tokens=64, sequence=16, machine=machine)

        later, drafted = predict(passes_are_long, max_norm=1e-3), predict(passes_are_long, max_norm=1e9)
        (before, before_back), (now, now_back) = host_seconds(later), host_seconds(drafted)
        assert drafted.seconds < later.seconds
        assert now < before
        draft = 4 + 8 + 4 + 4  # of weights: master, moments and gradient are read, the master is written
        times = 1 if states else 1 + draft / (2 * (4 + 8) + 4)
        assert now_back - before_back == pytest.approx((before - now) * times)
        later, drafted = predict(passes_are_short, max_norm=1e-3), predict(passes_are_short, max_norm=1e9)
        assert drafted.seconds <= later.seconds


def predict_on_cpu(rank: int, world_size: int) -> tuple[float, float]:
    """Seconds that a rank computes in its forward, and the bytes of its optimizer states."""
    model, optimizer = make()
    unbounded.shard(model, optimizer, {"optimizer": "host"})
    found = predict_step(model, tokens=64, sequence=16, machine=replace(UNMEASURED, is_cpu=True, kernel_seconds=0.0))
    assert found is not None
    return found.lane("first forward", "compute"), found.held["host"]["optimizer"]


def test_ranks_of_one_cpu_share_its_cores() -> None:
    (alone,) = run_ranks(1, predict_on_cpu)
    for shared in run_ranks(2, predict_on_cpu):
        assert shared == pytest.approx((2 * alone[0], alone[1] / 2), rel=1e-3)


class Idle:
    """A device of which nothing is taken."""

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def forget_peak(self) -> None:
        pass


def test_a_prediction_has_blocks_keep_what_they_will_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_policies, "close_policy", lambda policy, device: policy)
    monkeypatch.setattr(block_policies, "make_headroom", lambda model, count: Headroom(Idle(), 2**40, count))
    model, optimizer = make()
    model, sharded = unbounded.shard(model, optimizer, {"optimizer": "host"})
    (headroom,) = {block.headroom for block in attached_to(model)}
    assert headroom is not None
    taken = sharded.memory()["device"].used_bytes

    def kept(room: float) -> float:
        headroom._limit = int(taken + room)
        found = predict_step(model, tokens=4096, sequence=16, machine=replace(UNMEASURED, is_cpu=False))
        assert found is not None
        return found.held["device"].get("activations", 0.0)

    whole = kept(2**40)
    assert whole > 0
    assert kept(0) == 0  # inputs on the host
    sizes = [kept(part * whole) for part in (0.5, 0.8, 1.1)]
    assert sizes == sorted(sizes)
    assert 0 < sizes[0] < sizes[1] < whole
    assert all(size <= part * whole for size, part in zip(sizes, (0.5, 0.8, 1.1), strict=True))


def test_frozen_weights_leave_room_for_what_blocks_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """They never have gradients, though the plan says where those would be."""
    monkeypatch.setattr(block_policies, "close_policy", lambda policy, device: policy)
    monkeypatch.setattr(block_policies, "make_headroom", lambda model, count: Headroom(Idle(), 2**40, count))
    model, optimizer = make()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    model, sharded = unbounded.shard(model, optimizer)
    (headroom,) = {block.headroom for block in attached_to(model)}
    assert headroom is not None

    def device() -> dict[str, float]:
        found = predict_step(model, tokens=4, sequence=4, machine=replace(UNMEASURED, is_cpu=False))
        assert found is not None
        return found.held["device"]

    taken, whole = sharded.memory()["device"].used_bytes, device()
    headroom._limit = int(1.8 * taken)
    assert device() == whole


def test_the_command_prints_bytes_times_and_the_bottleneck(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-7b", "--machine", "rtx4090", "--tokens", "8192", "--compare"]) == 0
    text = capsys.readouterr().out
    for words in ("weights", "together", "tokens/s", "TFLOP/s per device", "bottleneck", "remedy", "stage 2"):
        assert words in text


def test_planning_for_another_machine_does_not_import_torch() -> None:
    code = (
        "import sys; from unbounded.cli import main; "
        "assert main(['plan', 'llama-7b', '--machine', 'h200', '--compare']) == 0; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "layers=4,hidden=512", "--machine", "h200", "--tokens", "4096", "--json", "--compare"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["tokens_per_step"] == 4096
    assert values["step_seconds"] == pytest.approx(sum(values["phases"].values()))
    assert set(values["weights"]) == {"embedding", "head", "root", *(f"blocks.{i}" for i in range(4))}
    assert values["alternatives"][0]["step_seconds"] > 0


def test_the_command_plans_adapters_of_a_config_as_of_its_sizes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    sizes = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 2816}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32000, **sizes}))
    found = []
    for model in (str(tmp_path), "layers=8,hidden=1024,gated=1,vocabulary=32000,ffn=2816"):
        assert main(["plan", model, "--machine", "rtx4090", "--tokens", "8192", "--lora-rank", "8", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["trained_parameters"] == found[1]["trained_parameters"] == 8 * 8 * (4 * 2048 + 3 * 3840)
    assert found[0]["parameters"] == found[1]["parameters"]
    assert found[0]["step_seconds"] == pytest.approx(found[1]["step_seconds"], rel=0.1)


def test_the_command_prints_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--papers"]) == 0
    text = capsys.readouterr().out
    assert "7.5B, stage 3, 64 ranks" in text
    assert text.count("MISS") == 2
    assert "123 of 125 figures" in text


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    assert main(["plan", "llama-7b", "--machine", "h200:16", "--tokens", "65536", "--html", str(path)]) == 0
    return path


def test_the_page_is_whole_and_needs_nothing_else(page: Path) -> None:
    text = page.read_text()
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 3
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    labels = re.findall(r'aria-label="([^"]+)"', text)
    assert labels == ["memory map", "lanes of a step", "scaling curve"]
    report = re.search(r"<pre>(.*?)</pre>", text, re.DOTALL)
    assert report is not None
    assert max(map(len, html.unescape(report[1]).splitlines())) <= COLUMNS
    assert re.search(r"^weights +[\d.]+ [GM]iB", report[1], re.MULTILINE)  # tables keep their columns
    assert not re.search(r"<script|src=|href=|url\(", text)


def test_the_memory_map_shows_the_budget_that_was_given(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    words = ["plan", "llama-1b", "--machine", "h200", "--device-bytes", "20GiB", "--html", str(path)]
    assert [main(words), main(words)] == [0, 0]  # a page of ours is replaced
    assert re.search(r"GiB of 18.0 GiB", path.read_text())  # nine tenths


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser")
def test_a_browser_draws_the_page(page: Path) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.stdout.count("<svg") == 3
    assert "the computation" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no MODEL was given"),
        (["lama-7b"], "Did you mean 'llama-7b'"),
        (["llama-7b", "--machine", "h201"], "there is no machine 'h201'"),
        (["llama-405b", "--machine", "laptop"], "fits nowhere"),
        (["llama-7b", "--machine", "rtx4090", "--device-bytes", "lots"], "which is not a size"),
        (["llama-7b", "--machine", "rtx4090", "--device-bytes", "1TiB"], "the machine 'rtx4090' has 24.0 GiB"),
        (["llama-7b", "--machine", "rtx4090", "--tokens", "3000"], "not a whole number of sequences of 2,048 for each"),
        (["llama-7b", "--machine", "rtx4090", "--sequence", "0"], "sequence is 0, but it must be at least 1"),
        ([""], "no MODEL was given"),
        (["llama-7b", "--machine", "rtx4090", "--html", ""], "which is a folder"),
        (["llama-7b", "--machine", "rtx4090", "--html", __file__], "which was not written by unbounded"),
        (["llama-7b", "--machine", "rtx4090", "--html", "/dev/null"], "which is a device"),
        (["layers=2,hidden=64,hidden=128", "--machine", "rtx4090"], "hidden is given twice: 64 and 128"),
        (["layers=2,hidden=64,heads=4,kv_heads=3", "--machine", "rtx4090"], "kv_heads is 3, but it must divide"),
        (["llama-70b", "--machine", "rtx4090", "--stage", "1"], "which take 131.4 GiB, but there are 21.6 GiB"),
        (["llama-7b", "--machine", "rtx4090", "--gradients", "disk", "--disk-bytes", "0"], "(gradients)"),
        (["llama-7b", "--machine", "h200", "--precision", "fp16", "--gradients", "none"], "but precision is 'fp16'"),
        (["llama-7b", "--machine", "rtx4090", "--lora-rank", "0"], "--lora-rank is 0, but it must be from 1 to 65,536"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


PHASES = nn.Linear(3, 3, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tensor": 3}, "tensor is 3, but it must divide the 8 devices of a node. Choose one of 1, 2, 4, 8"),
        ({"pipeline": 5}, "pipeline is 5, but it must divide the 32 layers of the model"),
        ({"pipeline": 2, "microbatches": 3}, "cannot be cut into 3 micro-batches"),
        ({"context": 2}, "does not know what a context axis costs"),
        ({"tokens_per_step": 2.5}, "tokens is 2.5, but it must be a whole number"),
        ({"sequence": "long"}, "sequence is 'long', but it must be a whole number"),
        ({"machine": 5}, "machine is a int"),
        ({"optimizer": "host"}, "plan takes the optimizer itself"),
        ({"weights": (("nothing*", "host"),)}, "'nothing*' in weights matches no unit"),
        ({"activations": (("nothing*", "host"),)}, "'nothing*' in activations matches no block. The blocks are"),
        ({"model": PHASES, "optimizer": 5}, "optimizer is a int. Give a torch.optim optimizer"),
        ({"model": nn.LazyLinear(3)}, "'weight' of a lazy module has no shape yet"),
        ({"model": PHASES, "optimizer": torch.optim.SGD(PHASES.parameters())}, "of torch.complex64 cannot be trained"),
    ],
)
def test_what_no_plan_can_have_is_refused_by_name(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        unbounded.plan(**{"model": "llama-7b", "machine": "h200:8", **asked})


def test_blocks_that_no_pair_matches_keep_as_with_shard() -> None:
    parts = footprint_of(make_shape(layers=3, hidden=256)).parts
    for activations, expected in (((("blocks.1", "host"),), {"keep", "host"}), ("recompute", {"recompute"})):
        kinds = find_rank_parts(parts, Plan(activations=activations), 1).kinds
        assert {kind.policy for kind in kinds if kind.part.is_block} == expected


@pytest.mark.parametrize(("asked", "may"), [({"precision": "bf16"}, True), ({"precision": "fp16"}, False)])
def test_only_a_job_that_may_drop_its_gradients_is_told_what_would_fit_without(
    asked: dict[str, Any], may: bool
) -> None:
    reasons = unbounded.plan("llama-7b", machine="h200", tokens_per_step=1, sequence=1, **asked).reasons
    assert ('gradients="none"' in reasons) == may
    assert " of 1 token x 1\n" in reasons


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(PlanError, match="has no parameters"):
        unbounded.plan(nn.Sequential(), machine="h200")


def test_a_pipeline_and_its_micro_batches_are_planned_as_they_are_asked_for() -> None:
    plan = unbounded.plan("llama-7b", machine="h200:8", pipeline=2, microbatches=4)
    assert "data 4 x tensor 1 x pipeline 2" in plan.reasons
    assert "tokens x 4" in plan.reasons


def test_a_summary_compares_the_run_with_its_prediction(tmp_path: Path) -> None:
    from unbounded.train.job.summary import Summary, describe_summary

    summary = Summary(tmp_path, None, 3, 3, 10, 10, 1.0, 0.5, None, 100.0, 1.0, 9.0)
    assert not any("predicted" in line for line in describe_summary(summary))
    known = replace(summary, predicted_seconds=2.31, step_seconds=2.26)
    assert any("predicted 2.31 s, measured 2.26 s" in line for line in describe_summary(known))
    slow = replace(summary, first_seconds=18.52)
    assert any(line.endswith(", the first in 18.5 s") for line in describe_summary(slow))
