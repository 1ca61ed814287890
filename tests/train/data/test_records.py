"""Records of every kind, in every container: what a document is, and where its loss is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.corpora import make_corpus, write_jsonl
from tests.train.jobs import losses, tiny, train
from unbounded.errors import DataError
from unbounded.train.data import json_arrays
from unbounded.train.data.document import DocumentReader, open_reader
from unbounded.train.data.records import Continued, Prompted
from unbounded.train.data.source import open_source
from unbounded.train.data.tokenizer import IGNORED, ByteTokenizer

ASKED = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "text": ({"text": "some text", "id": 7}, "some text"),
    "chat": ({"messages": ASKED}, ASKED),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        ASKED,
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "2+2", "output": "4"},
        [{"role": "user", "content": "Add.\n\n2+2"}, {"role": "assistant", "content": "4"}],
    ),
    "prompt": ({"prompt": "2+2=", "completion": "4"}, Prompted("2+2=", "4")),
    "prompt of messages": ({"prompt": ASKED[:1], "completion": ASKED[1:]}, Continued(ASKED, 1)),
}


def write_in(container: str, folder: Path, records: list[dict[str, Any]]) -> Path:
    if container == "jsonl":
        return write_jsonl(folder / "a.jsonl", records)
    if container == "array":
        (folder / "a.json").write_text(json.dumps(records, indent=2, ensure_ascii=False))
        return folder / "a.json"
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / "a.parquet")
    return folder / "a.parquet"


def open_one(path: Path, data_format: str = "auto") -> DocumentReader:
    return open_reader(open_source([str(path)], data_format), data_format, "text", None)


def documents_of(reader: DocumentReader) -> list[Any]:
    return [document for block in reader.source.blocks for document in reader.read(block)]


@pytest.mark.parametrize("container", ["jsonl", "array", "parquet"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_recognised_in_every_container(tmp_path: Path, kind: str, container: str) -> None:
    record, document = KINDS[kind]
    path = write_in(container, tmp_path, [record] * 3)
    assert documents_of(open_one(path)) == [document] * 3
    if kind not in ("text", "prompt of messages"):
        assert documents_of(open_one(path, kind)) == [document] * 3


def test_an_alpaca_record_without_input_is_its_instruction(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"instruction": "Say 4.", "input": "", "output": "4"}])
    assert documents_of(open_one(path))[0][0] == {"role": "user", "content": "Say 4."}


def test_the_texts_of_a_turn_in_parts_are_one_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "4"}]}]
    assert documents_of(open_one(write_jsonl(tmp_path / "a.jsonl", [{"messages": turns}]))) == [ASKED]


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"content": [{"type": "image", "url": "a.png"}]}, 'line 1: the "content" of a message holds a part of type'),
        ({"content": [None]}, "holds NoneType, not text"),
        ({"content": 0}, "holds int, not text"),
        ({"content": None, "tool_calls": [{"name": "add"}]}, '"tool_calls", but only its "content" would be trained'),
        ({"content": "4", "reasoning_content": "2 and 2"}, '"reasoning_content", but only its "content" would be'),
        ({"content": "4", "weight": 0}, '"weight", but only its "content" would be'),
        ({"content": "4", "train": False}, '"train", but only its "content" would be'),
    ],
)
def test_a_turn_that_holds_more_than_text_is_refused(tmp_path: Path, turn: dict[str, Any], said: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [*ASKED, {"role": "assistant", **turn}]}])
    with pytest.raises(DataError, match=said):
        documents_of(open_one(path))


@pytest.mark.parametrize(
    ("record", "unread"),
    [
        ({"conversations": [{"from": "gpt", "value": "4"}], "system": "be brief"}, "system"),
        ({"instruction": "2+2", "output": "4", "history": [["1+1", "2"]]}, "history"),
        ({"prompt": ASKED[:1], "completion": ASKED[1:], "tools": [{"name": "add"}]}, "tools"),
    ],
)
@pytest.mark.parametrize("container", ["jsonl", "parquet"])
def test_what_stands_beside_a_conversation_is_not_left_out(
    tmp_path: Path, container: str, record: dict[str, Any], unread: str
) -> None:
    with pytest.raises(DataError, match=f'has "{unread}", which would be left out'):
        documents_of(open_one(write_in(container, tmp_path, [record])))
    assert documents_of(open_one(write_in(container, tmp_path, [{**record, unread: None}])))


@pytest.mark.parametrize("container", ["jsonl", "parquet"])
def test_a_conversation_with_tools_is_not_trained_on_without_them(tmp_path: Path, container: str) -> None:
    path = write_in(container, tmp_path, [{"messages": ASKED, "tools": [{"name": "add"}]}])
    with pytest.raises(DataError, match='has "tools", which would be left out'):
        documents_of(open_one(path))
    weighed = [{**message, "weight": 1, "train": True, "thinking": None} for message in ASKED]
    assert documents_of(open_one(write_in(container, tmp_path, [{"messages": weighed, "tools": None}]))) == [ASKED]


def test_a_completion_alone_is_trained_on_and_ends_with_the_end_of_text() -> None:
    (encoded,) = ByteTokenizer().encode([Prompted("2+2=", "4")])
    assert encoded.tokens.tolist() == [*b"2+2=4", 256]
    assert encoded.targets.tolist() == [IGNORED] * 4 + [ord("4"), 256]


def test_an_array_is_cut_into_blocks_whose_elements_are_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_arrays, "_WINDOW_BYTES", 64)  # elements lie across windows
    texts = ["é" * (1 + i % 50) + '"]},\\' + str(i) for i in range(3000)]
    path = write_in("array", tmp_path, [{"text": text} for text in texts])
    reader = open_one(path)
    assert len(reader.source.blocks) > 5
    assert documents_of(reader) == texts
    corpus = make_corpus(path)
    blocks = [block for stream in range(corpus.num_streams) for block in corpus.order(0, stream)]
    shuffled = [document for block in blocks for document in corpus.documents(int(block), 0)]
    assert sorted(map(str, shuffled)) == sorted(texts)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"text": "a"}, {"text": ', "is not JSON: the array does not end, or an element is incomplete"),
        ("[1, 2]", "is of type int, but a record is an object"),
        ('{"text": "a"}\n[]', "is of type list, but a record is an object"),
        ('{\n"text": "a"\n}', r"is not JSON: .* A record is one whole line, or an element of one array\."),
        ('[{"text": "a"}]\n[{"text": "b"}]', "goes on after its array, at byte 15"),
        ("[" * 5000, "is nested too deeply|does not end"),
        ('[{"txt": "a"}]', 'Did you mean "txt"'),
        ('[{"text": 5}]', "holds int, not text"),
        ('[{"messages": [{"who": 1}]}]', "not a list of messages"),
    ],
)
def test_an_array_that_holds_no_records_is_refused_with_its_file(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=said) as caught:
        documents_of(open_one(tmp_path / "a.json"))
    assert "a.json" in str(caught.value)


@pytest.mark.parametrize("content", ["[]", " [ ] \n"])
def test_an_empty_array_is_no_data(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match="empty"):
        train(tiny(tmp_path / "out", tmp_path / "a.json"))


def test_a_job_learns_from_an_array_of_alpaca_records(tmp_path: Path) -> None:
    records = [{"instruction": f"number {i}", "input": "", "output": "on the host"} for i in range(200)]
    train(tiny(tmp_path / "out", write_in("array", tmp_path, records), steps=8))
    found = losses(tmp_path / "out")
    assert found[-1] < found[0] - 1.0
