"""Settings: defaults, file, flags, in that order. What makes no sense is refused in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest

from unbounded.cli import build_parser
from unbounded.errors import InputError
from unbounded.train.options.config import Config
from unbounded.train.options.fitting import fit_all
from unbounded.train.options.flags import make_config
from unbounded.train.options.settings import close_settings
from unbounded.train.training import run


def read_config(arguments: Sequence[str]) -> Config:
    return make_config(vars(build_parser("train").parse_args(["train", *arguments])))


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def refusal(*arguments: str) -> str:
    with pytest.raises(InputError) as caught:
        read_config(arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_flag_beats_the_file_and_the_file_the_default(tmp_path: Path) -> None:
    path = write(tmp_path / "run.toml", 'lr = 1e-3\nsteps = 7\ndata = "a.txt"\n[plan]\nstage = 2\noptimizer = "host"\n')
    others = ["disk_checksums=false", "compile=True", "watchdog_seconds=90.5", "disk_path=./1.0.x"]
    config = read_config([path, "--steps", "9", "--plan", "stage=1", "prefetch_units=3", *others])
    assert (config.lr, config.steps, config.data, config.beta1) == (1e-3, 9, ("a.txt",), 0.9)
    told = {"disk_checksums": False, "compile": True, "watchdog_seconds": 90.5, "disk_path": "./1.0.x"}
    assert dict(config.plan) == {"stage": 1, "optimizer": "host", "prefetch_units": 3, **told}


def test_a_flag_beats_the_file_also_where_the_file_says_it_in_another_way(tmp_path: Path) -> None:
    path = write(tmp_path / "run.toml", "epochs = 2\n")
    config = read_config([path, "--steps", "9"])
    assert (config.steps, config.epochs) == (9, None)
    assert "contradict" in refusal(write(tmp_path / "both.toml", "epochs = 2\nsteps = 3\n"))


def test_every_setting_is_a_flag_with_help_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser("train").parse_args(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for one in fields(Config):
        about = f"{one.metadata['help']} (default: {one.metadata['shown']})"
        assert "--" + one.name.replace("_", "-") in text
        assert " ".join(about.split()) in text.replace("- ", "-") or about in text
        assert one.metadata["shown"] not in ("", "None", "()", "False")


def test_values_of_all_kinds_are_read_from_flags() -> None:
    config = read_config(
        ["--data", "a", "b", "--report-to", "tensorboard,wandb", "--device-bytes", "2GiB"]
        + ["--decay", "linear", "--clip", "0"]
    )
    assert (config.data, config.report_to, config.device_bytes, config.decay, config.clip) == (
        ("a", "b"), ("tensorboard", "wandb"), "2GiB", "linear", 0.0,
    )  # fmt: skip


def test_a_misspelt_key_gets_a_suggestion(tmp_path: Path) -> None:
    path = write(tmp_path / "run.toml", "sequence_lenght = 5\n")
    assert refusal(path) == f'"{path}" has the unknown key \'sequence_lenght\'. Did you mean "sequence_length"?'


def test_a_misspelt_flag_ends_the_command_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--warm-up", "5"], 'there is no flag "--warm-up". Did you mean "--warmup"?'),
        (["--steps", "many"], "argument --steps: 'many' is not a whole number"),
        (["--plan", "stage"], "argument --plan: 'stage' is not key=value"),
    ):
        with pytest.raises(SystemExit) as caught:
            read_config(arguments)
        assert caught.value.code == 2
        assert capsys.readouterr().err == f"unbounded: {said}\n"


def test_values_of_the_wrong_type_are_refused_with_their_key(tmp_path: Path) -> None:
    assert "must be a whole number" in refusal(write(tmp_path / "a.toml", 'steps = "ten"\n'))
    assert "must be a number" in refusal(write(tmp_path / "b.toml", "lr = true\n"))
    assert 'Did you mean "cosine"?' in refusal(write(tmp_path / "c.toml", 'decay = "cosin"\n'))
    assert "cannot be read" in refusal(write(tmp_path / "d.toml", "steps = \n"))
    assert refusal(str(tmp_path / "none.toml")).count("settings file") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "m", "--from-config", "c"], "--model and --from-config contradict"),
        (["--steps", "1", "--epochs", "1"], "--steps and --epochs contradict"),
        (["--eval-data", "x", "--eval-fraction", "0.1"], "--eval-fraction and --eval-data contradict"),
        (["--model", "m", "--data", "d", "--layers", "2"], "--layers shapes the built-in GPT"),
        (["--lora-rank", "4"], "--lora-rank needs a Hugging Face model"),
        (["--lora-alpha", "4"], "without --lora-rank"),
        (["--model", "m", "--data", "d", "--lora-rank", "4", "--lora-alpha", "0"], "must be more than 0"),
        (["--model", "m"], "needs data"),
        (["--objective", "masked"], "the built-in GPT cannot see later tokens"),
        (["--objective", "masked", "--model", "m", "--data", "d", "--lora-rank", "4"], "predict the next token"),
        (["--device-bytes", "1GiB", "--plan", "device_bytes=5"], "--device-bytes and --plan device_bytes="),
        (["--plan", "gradients=none"], "judges every step by the norm"),
        (["--steps", "0"], "must be more than 0"),
        (["--clip", "-1"], "must be 0 or more"),
        (["--eval-fraction", "1"], "less than 1"),
        (["--steps", "5", "--warmup", "6"], "longer than the run"),
        (["--output", ""], "--output is empty, but it must be a path"),
        ([""], "the settings file has an empty name"),
    ],
)
def test_contradictions_are_refused(arguments: list[str], said: str) -> None:
    assert said in refusal(*arguments)


def test_values_from_python_are_read_like_those_of_flags(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    config = Config(data=str(tmp_path / "a.txt"), plan={"weights": "host"}, device_bytes=5, lr=1)  # type: ignore[arg-type]
    fitted = fit_all(replace(config, output=tmp_path))  # type: ignore[arg-type]
    assert (fitted.data, fitted.output) == ((str(tmp_path / "a.txt"),), str(tmp_path))
    assert (fitted.plan, fitted.device_bytes, fitted.lr) == ((("weights", "host"),), "5", 1.0)
    with pytest.raises(InputError, match=r'"packing" is \'separate\'.* Did you mean "separated"'):
        run(replace(config, packing="separate"))
    with pytest.raises(InputError, match='"steps" is -3, but it must be more than 0'):
        run(replace(config, steps=-3))


def test_a_leading_tilde_is_the_users_home_in_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = read_config(["--output", "~/runs/a", "--data", "~/a.txt", "b.txt", "--trace", "~nobody-here/t.json"])
    closed = close_settings(config, kind="cpu", num_ranks=1)
    assert (closed.output, closed.data) == ("/home/me/runs/a", ("/home/me/a.txt", "b.txt"))
    assert closed.trace == str(Path.cwd() / "~nobody-here" / "t.json")


def test_the_job_of_a_gpu_fits_its_memory_and_help_says_so() -> None:
    sizes = {}
    for kind, device_bytes in (("cpu", 0), ("cuda", 4 << 30), ("cuda", 8 << 30)):
        closed = close_settings(Config(), kind=kind, num_ranks=1, device_bytes=device_bytes)
        sizes[device_bytes] = closed.layers, closed.width, closed.micro_batch * closed.sequence_length, closed.steps
    shown = {one.name: one.metadata["shown"] for one in fields(Config)}
    for place, name in enumerate(("layers", "width", "micro_batch", "steps")):
        small, narrow, large = (size[place] for size in sizes.values())
        words = f"; on a GPU, {large}; if that has less than 7 GiB, {narrow}"
        assert words in shown[name], name
        assert name == "micro_batch" or shown[name].startswith(f"{small};")
    assert sizes[8 << 30][1] > sizes[4 << 30][1]
