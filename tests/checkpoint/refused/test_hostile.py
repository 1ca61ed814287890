"""Checkpoints and weight folders that were written to do harm: a correct checksum says nothing about who wrote them.

Each of them is refused with one of our errors, in bounded time and memory, and the model is as it was or marked.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.checkpoint.jobs import assert_same, build, train, whole
from unbounded.checkpoint import loading
from unbounded.checkpoint.conversion import export_checkpoint
from unbounded.checkpoint.format.folder import find
from unbounded.checkpoint.format.manifest import FORMAT, VERSION, checksum
from unbounded.errors import CheckpointError, StateError, UnboundedError

MUTATIONS = int(os.environ.get("UNBOUNDED_FUZZ", "300"))  # `python -m tests.faults` asks for more
SPARE_BYTES = 2 << 30


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "c"
    model, optimizer = build({"precision": "bf16"})
    train(model, optimizer, 0, 1, 0)
    model(tokens()).backward()  # with a gradient in it
    unbounded.save(folder, model, optimizer, note=[1, (2, {"x": 3.5})], tensor=torch.arange(4), big=2**70, key=b"ab")
    return folder


def tokens() -> torch.Tensor:
    from tests.zero.training import Batch

    return Batch(5, 0, 0).tokens()


def read_body(folder: Path) -> dict[str, Any]:
    return json.loads(folder.joinpath("manifest.json").read_bytes().split(b"\n")[1])


def write_body(folder: Path, body: Any, *, text: bytes | None = None) -> None:
    """A manifest with this body and the correct checksum."""
    text = json.dumps(body).encode() if text is None else text
    head = json.dumps({"format": FORMAT, "version": VERSION, "crc32c": f"{checksum(text):08x}"})
    (folder / "manifest.json").write_bytes(head[:-1].encode() + b', "body":\n' + text + b"\n}\n")


@contextmanager
def bounded() -> Iterator[None]:
    """What hangs is interrupted, and what takes more memory than any of this needs fails."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, _interrupt)
    resource.setrlimit(resource.RLIMIT_AS, (held + SPARE_BYTES, before[1]))
    signal.alarm(600)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _interrupt(*_: Any) -> None:
    raise TimeoutError("it does not end")


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def weight(body: dict[str, Any]) -> dict[str, Any]:
    return next(t for t in body["tensors"] if t["kind"] == "weight" and t["name"] == "body.blocks.1.up.weight")


def state(body: dict[str, Any], kind: str = "exp_avg") -> dict[str, Any]:
    return next(t for t in body["tensors"] if t["kind"] == kind and t["name"] == "body.blocks.1.up.weight")


def nest(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "negative offset": lambda b: weight(b)["slices"][0].update(offset=-4096),
    "offset after the file": lambda b: weight(b)["slices"][0].update(offset=1 << 40),
    "negative length": lambda b: weight(b)["slices"][0].update(nbytes=-1),
    "a file that is not listed": lambda b: weight(b)["slices"][0].update(file=7),
    "a file before the first": lambda b: weight(b)["slices"][0].update(file=-1),
    "true as a number": lambda b: weight(b)["slices"][0].update(file=False),
    "a float as a number": lambda b: weight(b)["slices"][0].update(offset=0.0),
    "two tensors on one place": lambda b: weight(b)["slices"][0].update(
        offset=state(b, "remainder")["slices"][0]["offset"]
    ),
    "a slice twice": lambda b: weight(b)["slices"].append(dict(weight(b)["slices"][0])),
    "no slices": lambda b: weight(b).update(slices=[]),
    "a box that goes down": lambda b: weight(b)["slices"][0].update(box=[[5, 0]]),
    "a box outside": lambda b: weight(b)["slices"][0].update(box=[[0, 1 << 50]]),
    "a box of too many dims": lambda b: weight(b)["slices"][0].update(box=[[0, 1]] * 5),
    "a huge shape": lambda b: weight(b).update(shape=[1 << 40, 1 << 40]),
    "a huge shape of nothing": lambda b: weight(b).update(shape=[1 << 60, 0]),
    "a negative shape": lambda b: weight(b).update(shape=[-23, -11]),
    "a thousand dims": lambda b: weight(b).update(shape=[1] * 1000),
    "another shape": lambda b: weight(b).update(shape=[11, 23, 1]) or b["parameters"].clear(),
    "a dtype that is a function": lambda b: weight(b).update(dtype="load"),
    "a dtype that is nothing": lambda b: weight(b).update(dtype="float33"),
    "a wider dtype": lambda b: state(b).update(dtype="float64"),
    "integers for moments": lambda b: state(b).update(dtype="int32"),
    "every is 0": lambda b: state(b).update(every=0),
    "every is huge": lambda b: state(b).update(every=1 << 19),
    "a rank that was not": lambda b: state(b).update(rank=5),
    "a name that is a list": lambda b: weight(b).update(name=[]),
    "a tensor of nobody": lambda b: state(b).update(name="nobody"),
    "a tensor twice": lambda b: b["tensors"].append(dict(weight(b))),
    "blocks of one byte": lambda b: b["files"][0].update(block_bytes=1),
    "blocks of nothing": lambda b: b["files"][0].update(block_bytes=0),
    "a long file of small blocks": lambda b: b["files"][0].update(nbytes=1 << 60, block_bytes=4096),
    "starts that go down": lambda b: b["files"][0].update(starts=[0, 8192, 4096]),
    "starts outside": lambda b: b["files"][0].update(starts=[0, 1 << 61]),
    "no starts": lambda b: b["files"][0].update(starts=[]),
    "checksums that are none": lambda b: b["files"][0]["crc32c"].__setitem__(0, "+0x0_1_2"),
    "a file above": lambda b: b["files"][0].update(name="../data-00000.bin"),
    "a device": lambda b: b["files"][0].update(name="/dev/zero"),
    "a file twice": lambda b: b["files"].append(dict(b["files"][0])),
    "no files": lambda b: b.update(files=[]),
    "files that are none": lambda b: b.update(files=3),
    "no tensors": lambda b: b.update(tensors=None),
    "an axis of a size in words": lambda b: b.update(mesh={"data": "two"}),
    "places of others": lambda b: b.update(places=[[0, 0, 0, 0]] * 1000),
    "a place on one axis": lambda b: b.update(places=[[0]]),
    "a deep value": lambda b: b["extra"]["0"].update(note=nest(5000)),
    "a value that nests as deep as it can": lambda b: b["extra"]["0"].update(note=nest(900)),
    "a tensor referred to often": lambda b: b["extra"]["0"].update(note=[b["extra"]["0"]["tensor"]] * 100_000),
    "a tensor that is not there": lambda b: b["extra"]["0"].update(note={"~tensor": "9-none"}),
    "a tensor by a list": lambda b: b["extra"]["0"].update(note={"~tensor": ["x"]}),
    "objects as numbers": lambda b: b["extra"]["0"].update(note={"~array": ["O", [1], "0-0"]}),
    "an import": lambda b: b["extra"]["0"].update(note={"~dtype": "ops"}),
    "a device of none": lambda b: b["extra"]["0"].update(note={"~device": "x" * 100}),
    "a set of lists": lambda b: b["extra"]["0"].update(note={"~set": [[1]]}),
    "pairs that are none": lambda b: b["extra"]["0"].update(note={"~dict": "ab"}),
    "extra of nobody": lambda b: b.update(extra={}),
    "extra that is none": lambda b: b.update(extra={"0": 3}),
    "random states of nothing": lambda b: b.update(random=[{"python": 1}]),
    "random states cut short": lambda b: b["random"][0].update(python={"~tuple": [3, {"~tuple": [1, 2]}, None]}),
    "random states as lists": lambda b: b.update(random=[[]]),
    "steps that go down": lambda b: b["parameters"]["gain"].update(step=-5),
    "steps of many digits": lambda b: b["parameters"]["gain"].update(step=10**400),
    "scalars that are none": lambda b: b["parameters"]["gain"].update(scalars={"x": "y"}),
    "a parameter that is none": lambda b: b["parameters"].update(gain=[]),
    "aliases of nothing": lambda b: b["parameters"]["gain"].update(aliases=[1]),
    "a loss scale of text": lambda b: b["optimizer"].update(loss_scale={"value": "x"}),
    "a loss scale of other fields": lambda b: b["optimizer"].update(loss_scale={"__class__": 1}),
    "a clip of text": lambda b: b["optimizer"].update(clip="x"),
    "parameters as options": lambda b: b["optimizer"]["groups"][0]["options"].update(params=[]),
    "a learning rate of text": lambda b: b["optimizer"]["groups"][0]["options"].update(lr="1e-3"),
    "options that are none": lambda b: b["optimizer"]["groups"][0].update(options=[]),
    "betas of three": lambda b: b["optimizer"]["groups"][0]["options"].update(betas={"~tuple": [0.1, 0.2, 0.3]}),
    "groups that are none": lambda b: b["optimizer"].update(groups={}),
    "an optimizer that is none": lambda b: b.update(optimizer=3),
    "a world of nobody": lambda b: b.update(world_size=0),
    "a world of text": lambda b: b.update(world_size="1"),
    "adapters above": lambda b: b.update(adapters={"../../x": {"config": {}, "tensors": {}}}),
    "adapters that are none": lambda b: b.update(adapters=[1]),
    "a model that is none": lambda b: b.update(model=None),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model to load into, and what it holds."""
    folder = tmp_path_factory.mktemp("model")
    model, optimizer = build({"precision": "bf16"}, seed=99)
    train(model, optimizer, 0, 1, 0)
    unbounded.save(folder / "before", model, optimizer)
    return model, optimizer, folder, whole(folder / "before")


def assert_untouched(loaded: Any) -> None:
    model, optimizer, folder, before = loaded
    unbounded.save(folder / "after", model, optimizer)
    assert_same(whole(folder / "after"), before)


def test_hostile_manifests_are_refused_and_change_nothing(copy: Path, loaded: Any) -> None:
    model, optimizer, *_ = loaded
    for name, change in HOSTILE.items():
        body = read_body(copy)
        original = json.dumps(body)
        change(body)
        write_body(copy, body, text=_dump_deep(body) if name == "a deep value" else None)
        assert attempt(copy, model, optimizer, name) == "refused", name
        write_body(copy, json.loads(original))
    assert_untouched(loaded)


def test_a_state_is_found_by_its_former_name_too(saved: Path, copy: Path) -> None:
    body = read_body(copy)
    for entry in body["tensors"]:
        entry["kind"] = "low" if entry["kind"] == "remainder" else entry["kind"]
    write_body(copy, body)
    assert_same(whole(copy), whole(saved))


def _dump_deep(body: dict[str, Any]) -> bytes:
    """JSON of a value that is nested more deeply than the encoder goes."""
    body["extra"]["0"]["note"] = "DEEP"
    return json.dumps(body).encode().replace(b'"DEEP"', b"[" * 100_000 + b"]" * 100_000)


def test_other_texts_are_refused_too(copy: Path, loaded: Any) -> None:
    model, optimizer, *_ = loaded
    texts = [b"", b"[]", b"3", b"null", b'{"a":NaN}', b"[" * 1_000_000, b'{"files":' * 200_000, b"9" * 1_000_000]
    for text in texts:
        write_body(copy, None, text=text)
        with bounded(), pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
            unbounded.load(copy, model, optimizer)
    assert_untouched(loaded)


def test_a_tensor_in_more_pieces_than_memory_holds_is_refused_before_they_are_listed(copy: Path, loaded: Any) -> None:
    """A file of holes costs nothing, and may be as long as the manifest says."""
    model, optimizer, *_ = loaded
    body, rows = read_body(copy), 1 << 23
    nbytes = 2 * rows
    os.truncate(copy / "data-00000.bin", nbytes + (16 << 20))
    blocks = -(-(nbytes + (16 << 20)) // (1 << 20))
    body["files"][0].update(nbytes=nbytes + (16 << 20), starts=[0], crc32c=["00000000"] * blocks)
    halves = [[[0, rows], [0, 1]], [[0, rows], [1, 2]]]
    pieces = [{"file": 0, "offset": (8 << 20) + i * rows, "nbytes": rows, "box": box} for i, box in enumerate(halves)]
    body["tensors"].append({"name": "x", "kind": "buffer", "shape": [rows, 2], "dtype": "uint8", "slices": pieces})
    write_body(copy, body)
    with bounded(), pytest.raises(CheckpointError, match="is in more than"):
        unbounded.load(copy, model, optimizer)


# -- fuzzed ------------------------------------------------------------------------------------------------------------

JUNK: list[Any] = [
    -1, 0, 1, 3, 2**31, 2**53, 2**62, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, True, None, "", "x", "../x",
    "/dev/zero", "data-00000.bin", "float32", "bfloat16", "~tensor", [], [[]], {}, [0], [[0, 1]], [[0, 2**40]],
    {"~tensor": "x"}, {"~int": "zz"}, {"~tuple": 3}, {"~scalar": ["<f8", [], "x"]}, "00000000", "9" * 5000,
]  # fmt: skip


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a JSON value: its container and its key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from nodes(value[key])


def mutate(body: Any, generator: random.Random) -> str:
    """Changes one to three places; says what."""
    done = []
    for _ in range(generator.choice([1, 1, 2, 3])):
        kinds = [body, body["files"][0], generator.choice(body["tensors"]), body["optimizer"] or {}, body["extra"]]
        container, key = generator.choice(list(nodes(generator.choice(kinds))) or [(body, "files")])
        action = generator.choice(["junk", "junk", "junk", "delete", "double", "swap", "add"])
        if action == "delete":
            del container[key]
        elif action == "double" and isinstance(container, list):
            container.insert(key, container[key])
        elif action == "swap":
            other, place = generator.choice(list(nodes(body)))
            container[key] = json.loads(json.dumps(other[place]))
        elif action == "add" and type(container[key]) in (int, float):
            container[key] += generator.choice([-1, 1, 4096, -4096, 2**20])
        else:
            container[key] = generator.choice(JUNK)
        done.append(f"{action} at {str(key)[:40]}")
        if not (isinstance(body.get("tensors"), list) and body["tensors"] and isinstance(body.get("files"), list)):
            break
        if not (body["files"] and isinstance(body.get("optimizer"), dict) and isinstance(body.get("extra"), dict)):
            break
    return ", ".join(done)


def attempt(copy: Path, model: nn.Module, optimizer: Any, what: str) -> str:
    """A load of whatever lies there: "refused" with the model unchanged, "marked", or "loaded"."""
    try:
        with bounded():
            unbounded.load(copy, model, optimizer)
    except UnboundedError:
        try:
            optimizer.wait()
        except StateError:
            return "marked"
        return "refused"
    except BaseException as error:
        pytest.fail(f"{what}: {type(error).__name__}: {error}")
    return "loaded"


@pytest.mark.parametrize("staged", [256 << 20, 0], ids=["staged", "in place"])
def test_fuzzed_manifests_are_refused_or_load_and_nothing_else(
    copy: Path, saved: Path, tmp_path: Path, monkeypatch: Any, staged: int
) -> None:
    monkeypatch.setattr(loading, "STAGED_BYTES", staged)
    generator = random.Random(int(os.environ.get("UNBOUNDED_FUZZ_SEED", "14")))
    model, optimizer = build({"precision": "bf16"}, seed=99)
    unbounded.save(tmp_path / "before", model, optimizer)
    before = whole(tmp_path / "before")
    outcomes = {"refused": 0, "marked": 0, "loaded": 0}
    text = json.dumps(read_body(saved))
    for _ in range(MUTATIONS // 2):
        body = json.loads(text)
        what = mutate(body, generator)
        write_body(copy, body)
        outcome = attempt(copy, model, optimizer, what)
        outcomes[outcome] += 1
        if outcome != "refused":
            unbounded.load(tmp_path / "before", model, optimizer)
    unbounded.save(tmp_path / "after", model, optimizer)
    assert_same(whole(tmp_path / "after"), before)
    assert not (staged and outcomes["marked"])  # what is small enough to be staged never changes the model
    assert outcomes["refused"] > MUTATIONS // 4


# -- files that are none -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "socket"])
@pytest.mark.parametrize("name", ["manifest.json", "data-00000.bin"])
def test_what_is_no_plain_file_is_refused_without_being_opened(copy: Path, loaded: Any, name: str, kind: str) -> None:
    model, optimizer, *_ = loaded
    make_special(copy / name, kind)
    with bounded(), pytest.raises(CheckpointError, match=r"no whole checkpoint|is not a plain file"):
        unbounded.load(copy, model, optimizer)


def make_special(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        import socket

        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))


def test_an_export_of_a_hostile_checkpoint_writes_nowhere_else(copy: Path, tmp_path: Path) -> None:
    body = read_body(copy)
    body["adapters"] = {"ok": {"config": {}, "tensors": {"k": "nobody"}}}
    write_body(copy, body)
    with pytest.raises(CheckpointError, match="has no nobody"):
        export_checkpoint(copy, tmp_path / "out")
    body["adapters"], body["config"] = {}, "[" * 100_000
    write_body(copy, body)
    with pytest.raises(CheckpointError, match="configuration is not usable"):
        export_checkpoint(copy, tmp_path / "out")
    assert find(copy) == copy


INDEXES: dict[str, Any] = {
    "above": {"weight_map": {"0.weight": "../outside.safetensors"}},
    "elsewhere": {"weight_map": {"0.weight": "/etc/hostname"}},
    "below": {"weight_map": {"0.weight": "sub/x.safetensors"}},
    "itself": {"weight_map": {"0.weight": ".."}},
    "a number": {"weight_map": {"0.weight": 3}},
    "a list": {"weight_map": ["0.weight"]},
    "nothing": {},
    "not there": {"weight_map": {"0.weight": "model-00001-of-00001.safetensors"}},
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    from safetensors.torch import save_file

    folder = tmp_path / "in"
    folder.joinpath("sub").mkdir(parents=True)
    for place in (tmp_path / "outside.safetensors", folder / "sub" / "x.safetensors"):
        save_file({"0.weight": torch.zeros(3, 3), "0.bias": torch.zeros(3)}, place)
    (folder / "model.safetensors.index.json").write_text(json.dumps(INDEXES[name]))
    with pytest.raises(CheckpointError, match=r"outside its folder|cannot be read|not there"):
        unbounded.shard(nn.Sequential(nn.Linear(3, 3)).to("meta"), weights=folder)


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "other.safetensors"])
def test_weights_that_are_no_plain_files_are_not_opened(tmp_path: Path, name: str, kind: str) -> None:
    make_special(tmp_path / name, kind)
    with bounded(), pytest.raises(CheckpointError, match=r"has no \.safetensors files"):
        unbounded.shard(nn.Sequential(nn.Linear(3, 3)).to("meta"), weights=tmp_path)
