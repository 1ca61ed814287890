"""Random command lines and settings files, most of them wrong, from a seed."""

from __future__ import annotations

import os
import random
from dataclasses import fields
from pathlib import Path

from unbounded.cli import available_verbs
from unbounded.planner.plan import Plan
from unbounded.train.options.config import Config

NUMBERS = [
    *(
        "0",
        "-1",
        "1",
        "2",
        "3",
        "7",
        "16",
        "0.5",
        "1e-3",
        "-0.0",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "1e308",
        "0x10",
        "1_000",
    ),
    *(
        str(2**31),
        str(2**31 - 1),
        str(2**32),
        str(2**63),
        str(2**63 - 1),
        str(-(2**63)),
        str(2**64),
        "9" * 30,
        "9" * 5000,
    ),
]
TEXTS = [
    *("", " ", "a", "none", "auto", "host", "cpu", "nvme", "disk", "device", "true", "bf16", "\n", "a\nb", "\udcff"),
    *(
        "é",
        "-",
        "--",
        "=",
        "a=b",
        "weights=host",
        "stage=1",
        "[]",
        "{}",
        "%s %d",
        "\x00",
        "x" * 300,
        "../" * 40,
        "*",
        "**",
    ),
    *("1GiB", "-1GiB", "1e9GiB", "nanGiB", "tensorboard", "tensorboard,,wandb", "²"),
]
TOML_VALUES = [
    *("0", "1", "-1", "2", "1.5", "nan", "inf", "-inf", "true", "false", '""', '"a"', '"host"', '"bf16"', "[]", "[[]]"),
    *(
        '["a"]',
        "[1]",
        '[["a", "host"]]',
        '[["*", "disk"], 3]',
        "{}",
        "{a = 1}",
        "{a = {b = [1, {c = 2}]}}",
        "1979-05-27",
    ),
    *(
        "07:32:00",
        "1979-05-27T07:32:00Z",
        str(2**63 - 1),
        str(2**70),
        '"\\u0000"',
        '"""\na\n"""',
        "'C:\\x'",
        "0x7fffffff",
    ),
    *("1e400", "[" * 3000 + "]" * 3000, '"' + "x" * 5000 + '"'),
]


class Fuzz:
    """Draws command lines of every verb; the files and folders that they name are in `folder`."""

    def __init__(self, seed: int, folder: Path, base: list[str]) -> None:
        self._draw = random.Random(seed)
        self._folder, self._base = folder, base
        self._paths = make_paths(folder)

    def command(self) -> list[str]:
        draw = self._draw
        verb = draw.choice(["train"] * 12 + ["report", "", "trian", *available_verbs()])
        if verb == "train":
            return ["train", *(self._toml() if draw.random() < 0.4 else []), *self._base, *self._flags()]
        if verb == "plan":
            return ["plan", *self._planned()]
        if verb == "bench":
            return [
                "bench",
                draw.choice(["host", "disk", "gpu", ""]),
                *self._bad_flags("parameters", "size", "threads"),
            ]
        words = [
            draw.choice(self._paths) if draw.random() < 0.8 else draw.choice(TEXTS) for _ in range(draw.randint(0, 3))
        ]
        flags = {"doctor": ["--path"], "export": ["--config", "--max-shard"], "report": ["--svg", "--html"]}
        if draw.random() < 0.5:
            words += [draw.choice(flags.get(verb, ["--verify", "--none"])), draw.choice(self._paths + TEXTS)]
        return [verb, *words]

    def _planned(self) -> list[str]:
        """A model that may not be one, on a machine that may not be one."""
        draw = self._draw
        model = draw.choice(
            ["llama-7b", "layers=2,hidden=64", "layers=x", f"layers={2**31},hidden=1", *self._paths, *TEXTS]
        )
        words = [
            model,
            "--machine",
            draw.choice(["h200:8", "dgx2:32", "h200:0", f"h200:{2**63}", *self._paths, *TEXTS]),
        ]
        flags = ("--tokens", "--sequence", "--stage", "--device-bytes", "--host-bytes", "--lora-rank", "--html")
        for _ in range(draw.randint(0, 2)):
            words += [draw.choice(flags), self._value()]
        return words

    def environment(self) -> dict[str, str]:
        """Sometimes a launcher that makes no sense, but never one of several ranks, which would wait for the others."""
        if self._draw.random() > 0.05:
            return {}
        name = self._draw.choice(["WORLD_SIZE", "RANK", "LOCAL_RANK"])
        return {name: self._draw.choice(["", "a", "-1", "0", "1.5", str(2**31), "0x1"])}

    def _flags(self) -> list[str]:
        words = []
        for _ in range(self._draw.randint(1, 3)):
            one = self._draw.choice(fields(Config))
            flag = "--" + one.name.replace("_", "-")
            if one.name == "plan":
                key = self._draw.choice([field.name for field in fields(Plan)] + ["stge"])
                words += [flag, f"{key}={self._value()}"]
            elif one.name in ("restart_data",):
                words += [self._draw.choice([flag, "--no-restart-data"])]
            else:
                words += [self._misspell(flag), self._value()]
        return words

    def _bad_flags(self, *names: str) -> list[str]:
        return [f"--{self._draw.choice(names)}", self._draw.choice(["0", "-1", "x", "", "9" * 30, str(2**63), "1.5"])]

    def _value(self) -> str:
        return self._draw.choice(self._draw.choice([NUMBERS, TEXTS, self._paths]))

    def _misspell(self, flag: str) -> str:
        if self._draw.random() > 0.05:
            return flag
        at = self._draw.randrange(len(flag))
        return flag[:at] + self._draw.choice("abc-_= ") + flag[at + 1 :]

    def _toml(self) -> list[str]:
        draw, lines = self._draw, []
        for _ in range(draw.randint(1, 3)):
            key = draw.choice([field.name for field in fields(Config)] + ["stps", "a.b", "plan.precision", ""])
            lines.append(f"{key} = {draw.choice(TOML_VALUES)}")
        if draw.random() < 0.3:
            key = draw.choice([field.name for field in fields(Plan)] + ["nothing"])
            lines += ["[plan]", f"{key} = {draw.choice(TOML_VALUES)}"]
        path = self._folder / "run.toml"
        path.write_bytes("\n".join(lines).encode() if draw.random() < 0.95 else os.urandom(40))
        return [str(path)] if draw.random() < 0.9 else [draw.choice(self._paths)]


def make_paths(folder: Path) -> list[str]:
    """Files, folders, links, devices and names that cannot be."""
    (folder / "file").write_text("not yours")
    (folder / "empty").touch()
    (folder / "folder").mkdir()
    (folder / "folder" / "a.txt").write_text("some text in a folder")
    (folder / "broken.json").write_text("[{")
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "trace.json").write_text('{"traceEvents": [{"ph": "X", "ts": "soon", "dur": null, "pid": 0, "tid": 0}]}')
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "gone").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "fifo")
    inside = [
        "file",
        "empty",
        "folder",
        "broken.json",
        "deep.json",
        "trace.json",
        "loop",
        "gone",
        "fifo",
        "new",
        "file/x",
    ]
    paths = [str(folder / name) for name in inside]
    return [
        *paths,
        "/dev/null",
        "/dev/zero",
        "/proc/self/mem",
        "x" * 300,
        "y/" * 3000,
        str(folder / ("z" * 255)),
        "~",
        "~a",
    ]
