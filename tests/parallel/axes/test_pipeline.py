"""Pipeline parallelism: schedules, their bubbles and memory, what stages exchange, and calls of the model itself."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests import process
from tests.parallel import models
from tests.parallel.comparing import optimizer_of, without_dropout
from unbounded.errors import PeerError, StateError
from unbounded.parallel.pipeline import runner
from unbounded.parallel.pipeline.batches import cut_batch
from unbounded.parallel.pipeline.draws import HostNumbers
from unbounded.parallel.pipeline.runner import Pipeline
from unbounded.parallel.pipeline.schedules import PassKind, make_schedule, simulate
from unbounded.parallel.pipeline.split_backward import WeightWork
from unbounded.parallel.pipeline.stage_exchange import StageExchange, TensorSpec
from unbounded.parallel.pipeline.stages import balance

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)


@pytest.mark.parametrize(("num_ranks", "num_micros"), [(2, 4), (4, 8), (8, 16)])
def test_bubbles_are_those_of_the_paper(num_ranks: int, num_micros: int) -> None:
    def bubble(schedule: str, chunks: int = 1) -> float:
        """Idle time, relative to the time that computing takes."""
        seconds = {
            PassKind.FORWARD: 1 / chunks,
            PassKind.BACKWARD: 2 / chunks,
            PassKind.INPUTS: 1.0,
            PassKind.WEIGHTS: 1.0,
        }
        orders = [make_schedule(schedule, rank, num_ranks, num_micros, chunks) for rank in range(num_ranks)]
        return simulate(orders, seconds, chunks) / (3 * num_micros) - 1

    paper = (num_ranks - 1) / num_micros
    assert bubble("gpipe") == pytest.approx(paper)
    assert bubble("1f1b") == pytest.approx(paper)
    assert bubble("interleaved", 2) == pytest.approx(paper / 2)
    assert bubble("interleaved", 4) == pytest.approx(paper / 4)
    assert bubble("zero_bubble") < paper / 1.9


def test_a_stage_keeps_no_more_micro_batches_than_its_schedule_says() -> None:
    for rank in range(4):
        for schedule, most in (("gpipe", 8), ("1f1b", 4 - rank), ("zero_bubble", 4 - rank)):
            kept = peak = 0
            for action in make_schedule(schedule, rank, 4, 8):
                kept += (action.work is PassKind.FORWARD) - (action.work in (PassKind.BACKWARD, PassKind.INPUTS))
                peak = max(peak, kept)
            assert peak == most


def test_stages_cost_alike_with_embedding_and_head_counted() -> None:
    assert balance([1] * 8, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert balance([1] * 8, 4, first=2, last=1)[0] == (0, 1)
    assert balance([1] * 8, 4, first=1, last=2)[-1] == (7, 8)
    assert balance([5, 1, 1, 1], 2) == [(0, 1), (1, 4)]


def test_a_loss_over_two_kinds_of_labels_needs_equal_micro_batches() -> None:
    batch = {"labels": torch.tensor([[1, 2], [3, -100]]), "next_sentence_label": torch.tensor([0, 1])}
    with pytest.raises(unbounded.errors.StateError, match=r"1 to 2 counted labels.* over 'next_sentence_label'"):
        cut_batch((), batch, 2, shifts=False, is_own=True)
    assert [micro.weight for micro in cut_batch((), batch, 2, shifts=False, is_own=False)] == [2 / 3, 1 / 3]
    batch["labels"][0, 0] = -100
    assert [micro.weight for micro in cut_batch((), batch, 2, shifts=False, is_own=True)] == [0.5, 0.5]


def test_labels_that_are_not_named_weigh_alike() -> None:
    tokens, labels = torch.ones(3, 3), torch.tensor([[1, 2, -100], [3, -100, -100], [-100] * 3])
    micros = cut_batch((tokens, labels), {}, 3, shifts=False, is_own=True, place=1)
    assert [micro.weight for micro in micros] == [2 / 3, 1 / 3, 0]
    assert [micro.args[1].tolist() for micro in micros] == [[[1, 2, -100]], [[3, -100, -100]], [[0, 0, 0]]]


def test_numbers_from_an_own_generator_are_not_those_that_stages_skip() -> None:
    numbers, own = HostNumbers(), torch.Generator()
    with numbers.noting():
        torch.rand(2, generator=own)
        torch.randn(3)
    before = numbers.state()
    torch.randn(3)
    after = numbers.state()
    numbers.go_to(before)
    numbers.pass_over(numbers.noted())
    assert torch.equal(numbers.state(), after)


class Costly(nn.Module):
    """A block whose computation is simulated by moving a virtual clock, and which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(_Cost.apply(x))


class _Cost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Clock.now += 1.0
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Clock.now += Clock.backward
        return gradient


class Clock(StageExchange):
    """Virtual time, in which only computing takes any. A receiver is never earlier than its sender."""

    now = 0.0
    backward = 2.0
    sent_bytes = 0

    def send(self, tensors: list[torch.Tensor], to: int, *, stage: int, back: bool) -> None:
        stamp = torch.tensor([Clock.now])
        super().send([*tensors, stamp], to, stage=stage, back=back)
        Clock.sent_bytes += sum(tensor.nbytes for tensor in tensors)

    def receive(self, parts: list[TensorSpec], source: int, *, stage: int, back: bool) -> list[torch.Tensor]:
        stamped = [*parts, TensorSpec((1,), torch.float32, False)]
        *tensors, stamp = super().receive(stamped, source, stage=stage, back=back)
        Clock.now = max(Clock.now, float(stamp))
        return tensors


class CostlyModel(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Costly() for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x.clone().requires_grad_())  # so that the first block's backward costs as much as others'


NUM_MICROS, NUM_BLOCKS = 8, 8


def measure(rank: int, size: int) -> dict[str, Any]:
    """For every schedule: the time of a batch, the bytes that this rank sent, and the most micro-batches it kept."""
    found = {}
    plain = runner.StageExchange, WeightWork.run, Pipeline._do
    kept = 0

    def late(work: WeightWork) -> None:
        Clock.now += NUM_BLOCKS / size
        plain[1](work)

    def do(self: Pipeline, *args: Any) -> None:
        nonlocal kept
        plain[2](self, *args)
        kept = max(kept, len([one for one in self._passes.values() if one.outputs]))

    runner.StageExchange, WeightWork.run, Pipeline._do = Clock, late, do  # type: ignore[misc, method-assign]
    try:
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
            model = CostlyModel(NUM_BLOCKS)
            plan = {"pipeline": size, "schedule": schedule, "microbatches": NUM_MICROS}
            model, _ = unbounded.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
            pipeline = unbounded.pipeline(model, loss=lambda output, batch: output.square().mean())
            pipeline(torch.ones(NUM_MICROS, 4))
            # A first batch is rehearsed, which no buffer shows; what a stage writes into one is known to all.
            assert [float(block.calls) for block in model.blocks] == [NUM_MICROS] * NUM_BLOCKS
            Clock.now, Clock.sent_bytes, kept = 0.0, 0, 0
            Clock.backward = 1.0 if schedule == "zero_bubble" else 2.0
            pipeline(torch.ones(NUM_MICROS, 4))
            assert pipeline.exchange is not None
            found[schedule] = Clock.now, Clock.sent_bytes, kept
    finally:
        runner.StageExchange, WeightWork.run, Pipeline._do = plain  # type: ignore[misc, method-assign]
    return found


def test_bubbles_bytes_and_kept_micro_batches_of_a_run_follow_the_formulas(ranks: Any) -> None:
    size, results = 4, ranks(4, measure)
    work = 3 * NUM_MICROS * NUM_BLOCKS / size  # forwards and backwards of a rank's blocks
    bubble = {name: max(r[name][0] for r in results) / work - 1 for name in results[0]}
    paper = (size - 1) / NUM_MICROS
    assert bubble["gpipe"] == bubble["1f1b"] == pytest.approx(paper)
    assert bubble["interleaved"] == pytest.approx(paper / 2)
    assert bubble["zero_bubble"] < paper / 1.9
    assert 1 + bubble["1f1b"] > 1.1 * (1 + bubble["interleaved"])
    activation = NUM_MICROS * 4 * 4  # the whole batch in fp32, once forward and once back over every edge
    for name in ("gpipe", "1f1b", "zero_bubble"):
        assert [r[name][1] for r in results] == [activation, 2 * activation, 2 * activation, activation]
    assert sum(r["interleaved"][1] for r in results) == 2 * 7 * activation
    assert [r["gpipe"][2] for r in results] == [NUM_MICROS] * size
    assert [r["1f1b"][2] for r in results] == [size - rank for rank in range(size)]


def call_the_model(rank: int, size: int, schedule: str) -> Any:
    model = models.build("gpt2")
    tokens = models.batch("gpt2", 0)["input_ids"]
    model.eval()
    batch = {**models.batch("gpt2", 0), "num_items_in_batch": torch.tensor(50)}
    with torch.no_grad():
        divided = model(**batch).loss
        wanted = model(tokens, use_cache=False).logits, model.generate(tokens, max_new_tokens=3, do_sample=False)
    model, _ = unbounded.shard(model, optimizer_of(model), {"pipeline": 2, "schedule": schedule})
    with torch.no_grad():
        found = model(tokens).logits, model.generate(tokens, max_new_tokens=3, do_sample=False, use_cache=False)
        loss = unbounded.pipeline(model)(**models.batch("gpt2", 0))
        torch.testing.assert_close(unbounded.pipeline(model)(**batch), divided)
    refusals = []
    elsewhere = model.transformer.h[3 * (1 - rank)]
    for call in (lambda: model(tokens), lambda: model.generate(tokens), lambda: elsewhere(torch.ones(1, 2, 16))):
        with pytest.raises(unbounded.errors.StateError) as caught:
            call()
        refusals.append(str(caught.value))
    return all(map(torch.equal, found, wanted)), float(loss), refusals


def test_without_gradients_the_model_itself_may_be_called(ranks: Any) -> None:
    for schedule in ("1f1b", "interleaved"):
        found = ranks(2, call_the_model, schedule)
        assert found[0] == found[1]
        assert found[0][0]
        training, generating, part = found[0][2]
        assert "Train with pipeline = unbounded.pipeline(model)" in training
        assert "Call the model, or model.generate, with use_cache=False" in generating
        assert "a block was called that another pipeline stage has" in part


def go_apart(rank: int, size: int) -> tuple[list[str], float, float]:
    """The refusals of later batches, and the losses of a batch before and after them."""
    model = without_dropout(models.build("gpt2", n_layer=2))
    model, optimizer = unbounded.shard(model, optimizer_of(model), {"pipeline": 2, "microbatches": 2})
    pipeline = unbounded.pipeline(model)
    with torch.no_grad():
        before = float(pipeline(**models.batch("gpt2", 0)))
    refusals = []
    for kind in ("length", "gradients"):
        with torch.set_grad_enabled(kind == "length" or rank == 0), pytest.raises(StateError) as caught:
            pipeline(**models.batch("gpt2", 1, length=8 + 2 * rank * (kind == "length")))
        refusals.append(str(caught.value))
    with torch.no_grad():
        after = float(pipeline(**models.batch("gpt2", 0)))
    with pytest.raises(PeerError) as caught:
        optimizer.step() if rank == 0 else pipeline(**models.batch("gpt2", 1))
    return [*refusals, str(caught.value)], before, after


def test_ranks_that_run_different_batches_raise_and_can_go_on(ranks: Any) -> None:
    for (length, gradients, steps), before, after in ranks(2, go_apart):
        assert "rank 1: 2 micro-batches, each a batch of input_ids (2, 10), labels (2, 10)" in length
        assert "labels (2, 8), without gradients" in gradients
        assert "rank 0 is in optimizer.step(); rank 1 is in a batch of the pipeline" in steps
        assert before == after


class Linears(nn.Module):
    """Its blocks return what autocast makes of their input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def cast_at_times(rank: int, size: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(2)
    model, x = Linears(), torch.randn(2, 4)
    plain = copy.deepcopy(model)
    model, _ = unbounded.shard(model, optimizer_of(model), {"pipeline": 2, "microbatches": 2})
    pipeline, found, wanted = unbounded.pipeline(model), [], []
    for is_cast in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            found.append(float(pipeline(x)))
            wanted.append(sum(float(plain(part)) / 2 for part in x.chunk(2)))
    return found, wanted


def test_stages_compute_in_other_dtypes_where_autocast_says_so(ranks: Any) -> None:
    for found, wanted in ranks(2, cast_at_times):
        assert found == pytest.approx(wanted, rel=1e-6)
        assert found[0] == found[2] != found[1]


def release(rank: int, size: int) -> list[bool]:
    freed = []
    for plan in ({"tensor": 2}, {"pipeline": 2}, {"context": 2}):
        model = models.build("gpt2", n_layer=2)
        model, optimizer = unbounded.shard(model, optimizer_of(model), plan)
        run = unbounded.pipeline(model) if "pipeline" in plan else model
        run(**models.batch("gpt2", 0))
        seen = weakref.ref(model)
        del model, optimizer, run
        freed.append(process.is_freed(seen))
    return freed


def test_a_model_that_nobody_holds_is_freed(ranks: Any) -> None:
    assert ranks(2, release) == [[True] * 3] * 2


class Sharing(nn.Module):
    """Blocks of all stages have one layer in common."""

    def __init__(self) -> None:
        super().__init__()
        bank = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(SharingBlock(bank) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SharingBlock(nn.Module):
    def __init__(self, bank: nn.Module) -> None:
        super().__init__()
        self.layer, self.bank = nn.Linear(8, 8), bank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.bank(self.layer(x)))


def share_a_layer(rank: int, size: int) -> list[float]:
    torch.manual_seed(0)
    model, batch = Sharing(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = unbounded.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), {"pipeline": size, "microbatches": 2}
    )
    pipe, seen = unbounded.pipeline(model, loss=lambda output, _: output.square().mean()), []
    for _ in range(3):
        expected = plain(batch).square().mean()
        expected.backward()
        seen.append(float(pipe(batch)) - float(expected.detach()))
        for one in (other, optimizer):
            one.step()
            one.zero_grad()
    return seen


def test_a_layer_that_blocks_of_all_stages_share_is_trained(ranks: Any) -> None:
    for differences in ranks(2, share_a_layer):
        assert differences == pytest.approx([0.0] * 3, abs=1e-6)


def generate_and_tune(rank: int, size: int) -> tuple[bool, float]:
    """Whether tokens after padded prompts are those of the plain model, and by what the loss of prompt tuning differs
    whose micro-batches have other numbers of labels."""
    import peft
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    plain = without_dropout(GPT2LMHeadModel(GPT2Config(**sizes)))
    ids = torch.randint(3, 48, (4, 9))
    mask = (torch.arange(9) >= torch.arange(4)[:, None]).long()
    asked = {"max_new_tokens": 4, "do_sample": False, "use_cache": False, "attention_mask": mask, "pad_token_id": 0}
    expected = plain.eval().generate(ids, **asked)
    model, _ = unbounded.shard(copy.deepcopy(plain), None, {"pipeline": size})
    is_same = torch.equal(model.eval().generate(ids, **asked), expected)

    tuned = peft.get_peft_model(plain.train(), peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    labels = ids.clone()
    labels[:2, 0] = labels[:2, 3:] = -100
    loss = float(tuned(input_ids=ids, labels=labels).loss.detach())
    tuned, _ = unbounded.shard(
        tuned, torch.optim.SGD(filter(lambda p: p.requires_grad, tuned.parameters())), {"pipeline": size}
    )
    return is_same, float(unbounded.pipeline(tuned)(input_ids=ids, labels=labels)) - loss


def test_padded_prompts_and_virtual_tokens_are_those_of_the_plain_model(ranks: Any) -> None:
    for is_same, difference in ranks(2, generate_and_tune):
        assert is_same
        assert difference == pytest.approx(0.0, abs=1e-5)
