"""`unbounded train` as a command: exit codes, one line for what the user can fix, the documented recipe."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.ranks import HANG_SECONDS
from tests.train.corpora import make_corpus, save_model, save_tokenizer, sentences, write_jsonl, write_texts
from tests.train.jobs import losses
from tests.warm import warm_python
from unbounded.cli import main
from unbounded.observe.metrics import read_metrics
from unbounded.train.data.document import Split
from unbounded.train.data.heldout import pack_held_out
from unbounded.train.data.loader import stack
from unbounded.train.data.tokenizer import FolderTokenizer

ROOT = Path(__file__).parents[2]
TINY = "--layers 2 --width 32 --heads 2 --sequence-length 32 --batch-tokens 128 --device cpu".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def refuse(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that the command ends with."""
    try:
        code = main(["train", "--device", "cpu", *map(str, arguments)])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert code == 2
    assert said.startswith("unbounded: ")
    assert said.count("\n") == 1
    return said


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_texts(tmp_path / "a.jsonl", 50)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "typo.toml").write_text("bacth_tokens = 5\n")
    larger = save_tokenizer(tmp_path / "larger", vocabulary=400)
    capsys.readouterr()
    assert "does not exist" in refuse(capsys, "--model", tmp_path / "none", "--data", data)
    assert "is empty" in refuse(capsys, "--data", tmp_path / "empty.txt")
    assert "does not match the model" in refuse(
        capsys, "--model", model, "--data", data, "--tokenizer", larger, "--sequence-length", 64
    )
    assert 'Did you mean "batch_tokens"?' in refuse(capsys, tmp_path / "typo.toml")
    assert "contradict" in refuse(capsys, "--steps", 5, "--epochs", 1)
    assert "Did you mean 'stage'?" in refuse(capsys, *TINY, "--data", data, "--plan", "stge=3")
    assert "Did you mean 'host'?" in refuse(capsys, *TINY, "--data", data, "--plan", "weights=cpu")
    assert "Did you mean 'disk'?" in refuse(capsys, *TINY, "--data", data, "--plan", "optimizer=nvme")
    assert 'Did you mean "host"?' in refuse(capsys, *TINY, "--data", data, "--activations", "cpu")
    assert "which is not a size" in refuse(capsys, *TINY, "--data", data, "--device-bytes", "lots")
    assert 'no checkpoint in "' in refuse(capsys, *TINY, "--data", data, "--resume", "must", "--output", tmp_path / "x")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_texts(tmp_path / "a.jsonl", 50)
    run = ["--data", data, "--output", tmp_path / "out", "--sample", "", "--eval-every", 0]
    assert main(["train", *TINY, *map(str, run), "--steps", "1"]) == 0
    capsys.readouterr()
    said = refuse(capsys, *TINY, *run, "--steps", 2, "--width", 48)
    assert "holds another run: its shape is [2, 32, 2, 32], not [2, 48, 2, 32]. Choose another --output" in said
    assert main(["train", *TINY, *map(str, run), "--steps", "2", "--width", "48", "--resume", "never"]) == 0


def test_the_summary_says_what_a_run_came_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_texts(tmp_path / "a.jsonl", 100)
    arguments = [*TINY, "--data", str(data), "--output", str(tmp_path / "out"), "--steps", "3", "--sample-tokens", "5"]
    assert main(["train", *arguments]) == 0
    said = capsys.readouterr().out
    parts = ("step 3/3", "--- a sample ---", "parameters", "tokens/s", "memory", "lanes", "step-00000003", "metrics")
    for part in parts:
        assert part in said


def test_a_run_killed_outright_goes_on_with_the_losses_of_one_that_was_not(tmp_path: Path) -> None:
    data = write_texts(tmp_path / "a.jsonl", 400)
    run = [*TINY, "--data", str(data), "--steps", "24", "--checkpoint-every", "3", "--sample", "", "--eval-every", "0"]
    stands_still = (
        "import sys, time; from unbounded.cli import main; from unbounded.train.step.loop import Trainer; "
        "seed = Trainer._seed; "  # of the step that begins
        "Trainer._seed = lambda self, number: time.sleep(1e6) if number == 16 else seed(self, number); "
        "main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", stands_still, "train", *run, "--output", str(tmp_path / "killed")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        metrics = tmp_path / "killed" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 6):
            time.sleep(0.005)
        process.kill()
    assert 6 < len(losses(tmp_path / "killed")) <= 16
    assert main(["train", *run, "--output", str(tmp_path / "killed")]) == 0
    assert main(["train", *run, "--output", str(tmp_path / "whole")]) == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_torchrun_starts_it_on_several_ranks(tmp_path: Path) -> None:
    data = write_texts(tmp_path / "a.jsonl", 100)
    run = [*TINY, "--data", str(data), "--steps", "3", "--sample", "", "--trace", str(tmp_path / "t.json")]
    launch = f"{warm_python()} -m torch.distributed.run --standalone --nproc-per-node 2 -m unbounded train".split()
    with (tmp_path / "said").open("w+") as said:  # a file, since a pipe would stay open as long as a rank lives
        command = [*launch, *run, "--output", str(tmp_path / "two")]
        code = subprocess.run(command, stdout=said, stderr=said, timeout=HANG_SECONDS, check=False).returncode
        said.seek(0)
        text = said.read()
    assert code == 0, text
    assert text.count("step 3/3") == 1  # only one rank prints
    assert main(["train", *run, "--output", str(tmp_path / "one")]) == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=2e-5)
    assert (tmp_path / "t.rank1.json").exists()


def test_help_is_complete_without_importing_torch() -> None:
    code = (
        "import sys; from unbounded.cli import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--sequence-length" in done.stdout
    assert done.stdout.endswith("[]\n")


def test_the_documented_recipe_fine_tunes_and_exports(tmp_path: Path, model: Path) -> None:
    """The settings of examples/fine-tune.toml, as the page on fine-tuning shows them, on a model made on the spot."""
    from transformers import AutoModelForCausalLM

    recipe = ROOT / "examples" / "fine-tune.toml"
    assert recipe.read_text() in (ROOT / "docs" / "fine-tuning.md").read_text()
    data = tmp_path / "chats.jsonl"
    turns = [(("user", text), ("assistant", "on the host")) for text in sentences(400)]
    chats = [[{"role": role, "content": content} for role, content in chat] for chat in turns]
    write_jsonl(data, [{"messages": messages} for messages in chats])
    places = f"--model {model} --data {data} --output {tmp_path}/out --disk-path {tmp_path} --export {tmp_path}/tuned"
    small = "--sequence-length 64 --batch-tokens 512 --steps 12 --warmup 2 --lr 1e-2 --device-bytes 1MiB --device cpu"
    assert main(["train", str(recipe), *places.split(), *small.split()]) == 0
    found = losses(tmp_path / "out")
    assert found[-1] < found[0] - 1.0
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype=torch.float32)
    reported = read_metrics(tmp_path / "out" / "metrics.jsonl", "eval")[-1]["loss"]
    assert _held_out_loss(tuned, data, model) == pytest.approx(reported, rel=1e-5)


def _held_out_loss(tuned: torch.nn.Module, data: Path, tokenizer: Path) -> float:
    """The loss of an exported model over the recipe's held-out documents, by transformers alone."""
    corpus = make_corpus(
        data, tokenizer=FolderTokenizer(tokenizer), split=Split(0.02, held_out=True), sequence_length=64
    )
    batch = stack(pack_held_out(corpus, 8 * 512))
    with torch.no_grad():
        scores = tuned.eval()(torch.from_numpy(batch.inputs)).logits.float()
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), torch.from_numpy(batch.targets).flatten()).item()
