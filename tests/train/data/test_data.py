"""The data pipeline: what is read, in which order, and that a state resumes it exactly."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.corpora import make_corpus, sentences, write_jsonl, write_texts
from unbounded.errors import DataError, InputError
from unbounded.train.data.corpus import Corpus, Stream, count_tokens
from unbounded.train.data.document import Split, open_reader
from unbounded.train.data.encoding import describe_replaced
from unbounded.train.data.heldout import pack_held_out, share
from unbounded.train.data.loader import Batch, Loader, merge
from unbounded.train.data.source import Block, DataFile, open_source, read_lines, read_text
from unbounded.train.data.tokenizer import IGNORED


def take(loader: Loader, count: int) -> list[Batch]:
    batches = [loader.next() for _ in range(count)]
    loader.close()
    return batches


def rows_of(batches: list[Batch]) -> list[list[int]]:
    return [row.tolist() for batch in batches for row in batch.inputs]


def documents_of(corpus: Corpus) -> list[str]:
    return [str(d) for block in corpus.reader.source.blocks for d in corpus.reader.read(block)]


def test_an_epoch_holds_every_document_once(tmp_path: Path) -> None:
    corpus = make_corpus(write_texts(tmp_path / "a.jsonl"))
    assert corpus.num_streams == 1  # 16 KiB blocks: too few of them for two streams
    dealt = [d for block in corpus.order(0, 0) for d in corpus.documents(int(block), 0)]
    assert sorted(str(d) for d in dealt) == sorted(sentences(400))
    assert dealt != sentences(400)


def test_streams_share_the_blocks_of_an_epoch_without_overlap(tmp_path: Path) -> None:
    for i in range(70):
        (tmp_path / f"{i}.txt").write_text(f"file {i}")
    corpus = make_corpus(tmp_path)
    assert corpus.num_streams == 16
    dealt = np.concatenate([corpus.order(3, stream) for stream in range(16)])
    assert sorted(dealt.tolist()) == list(range(70))
    assert corpus.order(3, 0).tolist() != corpus.order(4, 0).tolist()


def test_a_few_records_as_long_as_many_blocks_are_not_begun_by_every_stream(tmp_path: Path) -> None:
    text = "".join(chr(97 + i % 26) * 2 + " " for i in range(600_000))  # 1.8 MB, in 110 blocks of 16 KiB
    corpus = make_corpus(write_jsonl(tmp_path / "a.jsonl", [{"text": text}]), sequence_length=64)
    assert len(corpus.reader.source.blocks) > 64
    assert corpus.num_streams == 1
    rows = rows_of(take(Loader(corpus, rows=4), 2))
    assert [token for row in rows for token in row] == list(text[: 8 * 64].encode())
    several = make_corpus(write_jsonl(tmp_path / "b.jsonl", [{"text": text[: 200_000 + i]} for i in range(10)]))
    assert len(several.reader.source.blocks) > 64
    assert several.num_streams == 2


def test_packed_rows_are_the_documents_joined_with_an_end_token_and_targets_shifted_by_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh")
    batch = take(Loader(make_corpus(tmp_path / "a.txt", sequence_length=4), rows=3), 1)[0]
    stream = [*b"abcdefgh", 256, *b"abcdefgh", 256]
    assert batch.inputs.reshape(-1).tolist() == stream[:12]
    assert batch.targets.reshape(-1).tolist() == stream[1:13]


@pytest.mark.parametrize("rows", [8, 12])  # 12: does not match the 16 streams
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_together_read_the_same_global_batches_as_one(tmp_path: Path, world_size: int, rows: int) -> None:
    for i in range(80):
        (tmp_path / f"{i}.txt").write_text(sentences(1, seed=i)[0])
    corpus = make_corpus(tmp_path)
    alone = rows_of(take(Loader(corpus, rows=rows), 5))
    ranks = [take(Loader(corpus, rows=rows, rank=r, num_ranks=world_size), 5) for r in range(world_size)]
    for step in range(5):
        together = [ranks[row % world_size][step].inputs[row // world_size].tolist() for row in range(rows)]
        assert together == alone[step * rows : (step + 1) * rows]


def test_a_rank_reads_only_the_streams_its_rows_come_from(tmp_path: Path) -> None:
    for i in range(80):
        (tmp_path / f"{i}.txt").write_text(sentences(1, seed=i)[0])
    batch = take(Loader(make_corpus(tmp_path), rows=32, rank=1, num_ranks=4), 2)[-1]
    assert sorted(map(int, batch.state["streams"])) == [1, 5, 9, 13]


@pytest.mark.parametrize(("saved_on", "resumed_on"), [(1, 1), (1, 2), (2, 1), (4, 2)])
def test_a_saved_state_resumes_at_the_exact_sample_on_any_number_of_ranks(
    tmp_path: Path, saved_on: int, resumed_on: int
) -> None:
    corpus = make_corpus(write_texts(tmp_path / "a.jsonl", 4000), sequence_length=48)
    assert corpus.num_streams > 1
    reference = rows_of(take(Loader(corpus, rows=4), 12))
    states = [take(Loader(corpus, rows=4, rank=r, num_ranks=saved_on), 7)[-1].state for r in range(saved_on)]
    state = json.loads(json.dumps(merge(states)))
    rest: list[list[list[int]]] = []
    for rank in range(resumed_on):
        loader = Loader(corpus, rows=4, rank=rank, num_ranks=resumed_on)
        loader.load_state_dict(state)
        rest.append(rows_of(take(loader, 5)))
    resumed = [rest[row % resumed_on][row // resumed_on] for row in range(20)]
    assert resumed == reference[28:]


def test_the_state_is_that_of_what_was_given_out_not_of_what_was_made_ahead(tmp_path: Path) -> None:
    corpus = make_corpus(write_texts(tmp_path / "a.jsonl"))
    loader = Loader(corpus, rows=2, num_ahead=8)
    first = loader.next()
    second = loader.next()
    resumed = Loader(corpus, rows=2)
    resumed.load_state_dict(first.state)
    assert rows_of(take(resumed, 1)) == rows_of([second])
    assert loader.state_dict() == second.state
    loader.close()


def test_a_state_of_other_data_is_refused(tmp_path: Path) -> None:
    state = Loader(make_corpus(write_texts(tmp_path / "a.jsonl")), rows=2).state_dict()
    other = Loader(make_corpus(write_texts(tmp_path / "b.jsonl", 300)), rows=2)
    with pytest.raises(DataError, match="--restart-data"):
        other.load_state_dict(state)


def test_a_state_does_not_continue_in_records_that_are_read_as_text(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", 20)
    state = Loader(make_corpus(path), rows=2).state_dict()
    with pytest.raises(DataError, match=r"--data-format\), is not what the checkpoint was trained on"):
        Loader(make_corpus(path, data_format="text"), rows=2).load_state_dict(state)
    Loader(make_corpus(path, data_format="jsonl"), rows=2).load_state_dict(state)


def test_a_state_does_not_continue_with_another_packing(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl")
    joined, separated = (Loader(make_corpus(path, separated=value), rows=2).state_dict() for value in (False, True))
    Loader(make_corpus(path, separated=True), rows=2).load_state_dict(separated)
    with pytest.raises(DataError, match=r"--packing, .* is not what the checkpoint was trained on"):
        Loader(make_corpus(path, separated=True), rows=2).load_state_dict(joined)


def test_a_state_of_the_same_file_with_its_lines_in_another_order_is_refused(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl")
    state = Loader(make_corpus(path), rows=2).state_dict()
    Loader(make_corpus(path), rows=2).load_state_dict(state)
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    with pytest.raises(DataError, match="--restart-data"):
        Loader(make_corpus(path), rows=2).load_state_dict(state)
    without = {key: value for key, value in state.items() if key != "content"}  # as older checkpoints have it
    Loader(make_corpus(path), rows=2).load_state_dict(without)


def test_one_seed_gives_one_order_and_another_seed_another(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl")
    orders = [rows_of(take(Loader(make_corpus(path, seed=seed), rows=4), 3)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_large_text_files_are_cut_at_line_ends_and_lose_no_byte(tmp_path: Path) -> None:
    text = "\n".join(sentences(9000)) + "\n" + "é" * 300_000  # the last line is longer than a block
    (tmp_path / "a.txt").write_text(text)
    source = open_source([str(tmp_path / "a.txt")])
    pieces = [read_text(source.files[0], block) for block in source.blocks]
    assert b"".join(pieces).decode() == text
    assert len(pieces) > 3
    assert all(piece.decode() for piece in pieces)  # no character is cut
    assert pieces[0].endswith(b".\n")


def test_lines_longer_than_a_block_are_read_once(tmp_path: Path) -> None:
    texts = ["x" * 100_000, "short", "y" * 50_000, "end"]
    corpus = make_corpus(write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts]))
    assert len(corpus.reader.source.blocks) > len(texts)
    assert documents_of(corpus) == texts


def test_of_a_line_longer_than_a_block_a_block_inside_reads_no_more_than_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus(write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * 300_000}, {"text": "end"}]))
    num_bytes, read = (tmp_path / "a.jsonl").stat().st_size, []

    class Counted(io.FileIO):
        def readline(self, *limit: Any) -> bytes:
            read.append(super().readline(*limit))
            return read[-1]

    monkeypatch.setattr(Path, "open", lambda path, mode: Counted(path, mode))
    for block in corpus.reader.source.blocks:
        read_lines(corpus.reader.source.files[0], block)
    assert len(corpus.reader.source.blocks) > 10
    assert sum(map(len, read)) < 2.1 * num_bytes  # once as a line, once in search of the next one


def test_parquet_gives_the_documents_of_its_rows(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table({"text": sentences(3000), "n": range(3000)}), tmp_path / "a.parquet", row_group_size=1300
    )
    corpus = make_corpus(tmp_path / "a.parquet")
    assert len(corpus.reader.source.blocks) == 3
    assert documents_of(corpus) == sentences(3000)
    shuffled = list(corpus.documents(0, 0))
    assert sorted(map(str, shuffled)) == sorted(sentences(3000)[:1300])


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_folder_that_datasets_saved_gives_the_documents_of_its_rows(tmp_path: Path, is_stream: bool) -> None:
    import pyarrow

    table = pyarrow.table({"text": sentences(3000), "n": range(3000)})
    (tmp_path / "train").mkdir()
    write = pyarrow.ipc.new_stream if is_stream else pyarrow.ipc.new_file
    with write(str(tmp_path / "train" / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    for about in ("dataset_dict.json", "train/dataset_info.json", "train/state.json", "README.md"):
        (tmp_path / about).write_text(json.dumps({"about": about}, indent=2))
    corpus = make_corpus(tmp_path)
    assert [len(list(corpus.documents(block, 0))) for block in range(3)] == [1024, 1024, 952]
    assert documents_of(corpus) == sentences(3000)
    assert list(corpus.documents(0, 0)) != sentences(3000)[:1024]  # drawn over all chunks of the file
    assert sorted(map(str, corpus.documents(0, 0))) == sorted(sentences(3000)[:1024])


def test_an_arrow_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(b"no table")
    with pytest.raises(DataError, match=r'a\.arrow" is not a readable Arrow file'):
        make_corpus(tmp_path / "a.arrow")


def test_folders_behind_links_are_searched_once_and_one_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("data/in", "elsewhere", "data/.hidden"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text(name)
    for name, target in (("link", "elsewhere"), ("other", "elsewhere"), ("in/loop", "data"), (".no", "elsewhere")):
        (tmp_path / "data" / name).symlink_to(tmp_path / target)
    found = [file.path.relative_to(tmp_path) for file in open_source([str(tmp_path / "data")]).files]
    assert found == [Path("data/in/a.txt"), Path("data/link/a.txt")]

    def refuse(folder: Any) -> Any:  # root may read everything
        if str(folder).endswith("/in"):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scan(folder)

    scan = os.scandir
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="data/in"):
        open_source([str(tmp_path / "data")])


def test_a_mark_of_the_encoding_is_no_text_and_a_pipe_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    assert documents_of(make_corpus(tmp_path / "a.txt")) == ["text"]
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(DataError, match=r'b\.txt" is not a file'):
        open_source([str(tmp_path / "b.txt")])


def test_held_out_documents_are_never_trained_on_and_stay_the_same_when_files_are_added(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", 2000)
    held_out = {d for d in documents_of(make_corpus(path)) if Split(0.1, held_out=True).has(d)}
    trained = {d for d in documents_of(make_corpus(path)) if Split(0.1).has(d)}
    assert held_out | trained == set(sentences(2000))
    assert not held_out & trained
    assert 100 < len(held_out) < 300
    write_jsonl(tmp_path / "b.jsonl", [{"text": text} for text in sentences(50, seed=9)])
    again = {d for d in documents_of(make_corpus(tmp_path)) if Split(0.1, held_out=True).has(d)}
    assert held_out <= again


def test_evaluation_rows_are_shared_evenly_and_each_target_counts_once(tmp_path: Path) -> None:
    corpus = make_corpus(write_texts(tmp_path / "a.jsonl"), split=Split(0.2, held_out=True))
    sequences = pack_held_out(corpus, max_tokens=1000)
    assert len(sequences) == 31
    parts = [list(share(sequences, rows=2, rank=rank, num_ranks=4)) for rank in range(4)]
    assert {len(part) for part in parts} == {4}
    assert sum(batch.num_targets for part in parts for batch in part) == 31 * 32


def test_evaluation_data_with_nothing_to_predict_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "long " * 99, "completion": "cut off"}])
    with pytest.raises(DataError, match=r"the \d+ tokens of the evaluation data have nothing to predict: they are pro"):
        pack_held_out(make_corpus(path), max_tokens=64)


def test_the_tokens_of_an_epoch_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("defgh")
    corpus = make_corpus(tmp_path)
    assert count_tokens(corpus, list(corpus.reader.source.blocks)) == 10


@pytest.mark.parametrize("overlap", [0, 8, 31])
def test_an_epoch_with_an_overlap_has_the_sequences_that_repeat_it(tmp_path: Path, overlap: int) -> None:
    corpus = make_corpus(write_texts(tmp_path / "a.jsonl", 40), overlap=overlap)
    stream = Stream(corpus, 0)
    assert corpus.num_streams == 1
    while not stream.place.epoch:
        stream.next()
    counted = count_tokens(corpus, list(corpus.reader.source.blocks)) / corpus.sequence_length
    assert counted == pytest.approx(stream.place.taken, rel=0.02)


def test_bad_data_is_named_with_its_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"txt": "no"}\n')
    with pytest.raises(DataError, match=r'a\.jsonl" line 2 has no field "text"\. Did you mean "txt"\?'):
        documents_of(make_corpus(path))
    path.write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(DataError, match=r'a\.jsonl" line 2 is not JSON'):
        documents_of(make_corpus(path))
    path.write_text('{"text": 5}\n')
    with pytest.raises(DataError, match="holds int, not text"):
        documents_of(make_corpus(path))


def test_missing_and_empty_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    with pytest.raises(DataError, match=r'corpos\.txt" does not exist\. Did you mean ".*corpus\.txt"'):
        open_source([str(tmp_path / "corpos.txt")])
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="is empty: all files there have zero bytes"):
        open_source([str(tmp_path / "empty.txt")])
    (tmp_path / "blank.jsonl").write_text("\n\n\n")
    with pytest.raises(DataError, match="training data is empty"):
        Loader(make_corpus(tmp_path / "blank.jsonl"), rows=1).next()
    with pytest.raises(DataError, match=r"--eval-fraction 0\.999999999 holds out all 1 documents"):
        Loader(make_corpus(tmp_path / "corpus.txt", split=Split(1 - 1e-9)), rows=1).next()
    with pytest.raises(DataError, match="no document was held out"):
        pack_held_out(make_corpus(tmp_path / "corpus.txt", split=Split(1e-9, held_out=True)), 100)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(b"text " * 1000, mtime=0), "is compressed with gzip, and is not plain text"),
        ("text".encode("utf-16"), "is text in UTF-16, but text is read as UTF-8"),
        (b"text\0text", "has a zero byte at 4, so it is not plain text"),
    ],
    ids=["gzip", "UTF-16", "binary"],
)
def test_what_is_not_text_is_not_trained_on_as_text(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "corpus.jsonl.gz").write_bytes(content)
    with pytest.raises(DataError, match=said):
        open_source([str(tmp_path / "corpus.jsonl.gz")])


@pytest.mark.parametrize(
    ("content", "replaced"),
    [
        ("plain é ".encode() * 400_000, 0),  # characters lie across the chunks that are read
        (b"x" + "é".encode() * 700_000, 0),
        ("Grüße ".encode("latin-1") * 400_000, 800_000),
        ("cut é".encode()[:-1], 1),  # the file ends within a character
        (b"\xf0\x9f\x98 and more", 3),  # becomes one replacement character
    ],
)
def test_bytes_that_are_not_utf_8_are_counted(tmp_path: Path, content: bytes, replaced: int) -> None:
    (tmp_path / "some.txt").write_bytes(content)
    (file,) = open_source([str(tmp_path)]).files
    said = describe_replaced([file])
    assert said == [f'"{file.path}" is not all UTF-8: {replaced:,} bytes are read as replacement characters. '
                    "Convert it with iconv."] * bool(replaced)  # fmt: skip


def test_only_the_beginning_of_large_data_is_looked_at_for_its_encoding(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.jsonl"):
        (tmp_path / name).write_bytes("é".encode() * 5 + "é".encode("latin-1") * 10)
    files = open_source([str(tmp_path)]).files
    assert describe_replaced(files, 9) == []  # which ends within a character
    (one,) = describe_replaced(files, 15)
    assert 'a.txt" is not all UTF-8: 4 bytes of its first 15 are' in one  # the last may begin a character
    assert len(describe_replaced(files)) == 2  # records are refused when they are read


def test_conversations_without_an_answer_are_left_out(tmp_path: Path) -> None:
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    unanswered = [{"messages": [question]}] * 5
    corpus = make_corpus(write_jsonl(tmp_path / "some.jsonl", [*unanswered, {"messages": [question, answer]}]))
    read = [d for block in corpus.reader.source.blocks for d in corpus.reader.read(block)]
    assert [d for d in read if corpus.has(d)] == [[question, answer]]
    with pytest.raises(DataError, match=r"hold no document .*with answers of the assistant"):
        Loader(make_corpus(write_jsonl(tmp_path / "none.jsonl", unanswered)), rows=1).next()


def test_a_batch_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="6 sequences cannot be split evenly over 4 ranks"):
        Loader(make_corpus(write_texts(tmp_path / "a.jsonl")), rows=6, num_ranks=4)


def test_plain_text_among_chats_is_refused(tmp_path: Path) -> None:
    chat = write_jsonl(tmp_path / "a.jsonl", [{"messages": []}])
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(DataError, match="plain text among chat data"):
        open_reader(open_source([str(chat), str(tmp_path / "b.txt")]), "auto", "text", None)


def test_a_block_that_begins_at_a_line_begins_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\ncd\nef")
    file = DataFile(tmp_path / "a.txt", "text", 8)
    assert read_text(file, Block(0, 3, 6)) == b"cd\n"
    assert IGNORED == -100
