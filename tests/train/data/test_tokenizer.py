"""Tokens and targets: end marks, chat turns, and a loss on answers only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.corpora import make_corpus, save_tokenizer, write_jsonl
from unbounded.errors import DataError
from unbounded.train.data.loader import Loader
from unbounded.train.data.records import Continued, Prompted, has_answer
from unbounded.train.data.tokenizer import IGNORED, ByteTokenizer, Encoded, FolderTokenizer, Tokenizer

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "where do weights live?"},
    {"role": "assistant", "content": "on the host"},
    {"role": "user", "content": "and states?"},
    {"role": "assistant", "content": "on disk"},
]
TURNS = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
COUNT = "{{ messages|selectattr('role', 'eq', 'user')|list|length }}"  # changes as the conversation goes on
REWRITES = "{% for m in messages %}{% if m.role != 'assistant' %}" + COUNT + "{% endif %}{{ m.content }}{% endfor %}"


def trained_text(tokenizer: Tokenizer, encoded: Encoded) -> str:
    return tokenizer.decode([int(t) for t in encoded.targets if t != IGNORED])


def test_bytes_are_tokens_and_256_ends_a_document() -> None:
    encoded = ByteTokenizer().encode(["aé"])[0]
    assert encoded.tokens.tolist() == [97, 0xC3, 0xA9, 256]
    assert ByteTokenizer().decode([97, 0xC3, 0xA9, 256]) == "aé"


def test_without_a_template_the_loss_is_on_the_answers_and_their_end() -> None:
    tokenizer = ByteTokenizer()
    encoded = tokenizer.encode([CHAT])[0]
    assert trained_text(tokenizer, encoded) == "on the host\non disk\n"
    assert (encoded.targets == tokenizer.end).sum() == 2
    assert "<|user|>\nand states?" in tokenizer.decode(encoded.tokens.tolist())


def test_with_a_template_the_loss_is_on_what_each_answer_adds(tmp_path: Path) -> None:
    tokenizer = FolderTokenizer(save_tokenizer(tmp_path, chat_template=TEMPLATE))
    encoded = tokenizer.encode([CHAT])[0]
    assert trained_text(tokenizer, encoded) == "on the host\non disk\n"
    rendered = tokenizer.inner.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.inner.decode(encoded.tokens[:-1].tolist()) == rendered
    assert (encoded.targets == tokenizer.end).sum() == 2  # the template's own ends; the separator has no loss


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["bytes", "template"])
def test_the_answers_in_a_prompt_of_messages_are_not_trained_on(tmp_path: Path, template: str | None) -> None:
    tokenizer = FolderTokenizer(save_tokenizer(tmp_path, chat_template=template)) if template else ByteTokenizer()
    whole, continued = tokenizer.encode([CHAT])[0], tokenizer.encode([Continued(CHAT, 3)])[0]
    assert continued.tokens.tolist() == whole.tokens.tolist()
    assert trained_text(tokenizer, continued) == "on disk\n"
    assert not has_answer(Continued(CHAT, len(CHAT)))


def test_an_answer_to_which_the_template_adds_nothing_ends_its_conversation(tmp_path: Path) -> None:
    without_ends = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = FolderTokenizer(save_tokenizer(tmp_path, chat_template=without_ends))
    encoded = tokenizer.encode([[{"role": "user", "content": "host"}, {"role": "assistant", "content": ""}]])[0]
    assert encoded.tokens.tolist() == tokenizer.encode(["host"])[0].tokens.tolist()
    assert (encoded.targets == IGNORED).all()


def test_a_template_that_rewrites_earlier_turns_trains_on_the_last_answer(tmp_path: Path) -> None:
    tokenizer = FolderTokenizer(save_tokenizer(tmp_path, chat_template=REWRITES))
    assert trained_text(tokenizer, tokenizer.encode([CHAT])[0]) == "on disk"


def test_a_template_that_hides_where_answers_begin_is_refused(tmp_path: Path) -> None:
    tokenizer = FolderTokenizer(save_tokenizer(tmp_path, chat_template="{{ messages|length }}"))
    with pytest.raises(DataError, match="does not put answers after their prompt"):
        tokenizer.encode([CHAT])


def test_a_length_that_the_tokenizer_cuts_and_pads_to_does_not_change_documents(tmp_path: Path) -> None:
    whole = FolderTokenizer(save_tokenizer(tmp_path)).encode(["the host and the disk " * 9, "the"])
    path, about = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    core = json.loads(path.read_text())
    core["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    core["padding"] = {"strategy": {"Fixed": 4}, "direction": "Right", "pad_to_multiple_of": None}
    core["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}
    path.write_text(json.dumps(core))
    about.write_text(json.dumps({k: v for k, v in json.loads(about.read_text()).items() if k != "bos_token"}))
    again = FolderTokenizer(tmp_path).encode(["the host and the disk " * 9, "the"])
    assert [encoded.tokens.tolist() for encoded in again] == [encoded.tokens.tolist() for encoded in whole]


@pytest.mark.parametrize("puts_space", ["prepend", "metaspace"])
def test_an_answer_gets_no_space_that_it_does_not_have(tmp_path: Path, puts_space: str) -> None:
    """Tokenizers such as Llama 2's put a space before every text, also before one that continues another."""
    from tokenizers import Tokenizer as Core
    from tokenizers import models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Core(models.BPE())
    if puts_space == "prepend":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace("_", prepend_scheme="first", split=False)
    core.train_from_iterator(["2+2=4 ?"], trainers.BpeTrainer(vocab_size=9, special_tokens=["</s>"]))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = FolderTokenizer(tmp_path)
    tokens = [
        "".join(tokenizer.inner.convert_ids_to_tokens(encoded.tokens.tolist()))
        for encoded in tokenizer.encode([Prompted("2+2=", "4"), Prompted("2+2=", " 4"), Prompted("", "4")])
    ]
    assert tokens == ["_2+2=4</s>", "_2+2=_4</s>", "_4</s>"]


@pytest.mark.parametrize("begins", [False, True])
def test_a_begin_token_is_put_where_the_tokenizer_itself_puts_one(tmp_path: Path, begins: bool) -> None:
    tokenizer = FolderTokenizer(save_tokenizer(tmp_path, begins=begins))
    tokens = tokenizer.encode(["the host"])[0].tokens.tolist()
    assert tokens == [*tokenizer.inner("the host")["input_ids"], tokenizer.end]
    assert (tokens[0] == tokenizer.inner.bos_token_id) is begins
    assert tokenizer.encode_prompt("the host") == tokens[:-1]


@pytest.mark.parametrize(
    "document", ["half \ud83d of one", Prompted("q\udc00", "a\ud800"), [*CHAT[:2], dict(CHAT[2], content="\ud83d")]]
)
def test_half_a_character_of_json_becomes_a_replacement_character(tmp_path: Path, document: Any) -> None:
    tokenizer = FolderTokenizer(save_tokenizer(tmp_path, chat_template=TEMPLATE))
    assert "\ufffd" in tokenizer.decode(tokenizer.encode([document])[0].tokens.tolist())


def test_chat_rows_count_only_the_answers_as_targets(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": CHAT}] * 20)
    loader = Loader(make_corpus(path, sequence_length=200), rows=4)
    batch = loader.next()
    loader.close()
    assert 0 < batch.num_targets == (batch.targets != IGNORED).sum() < 200
    answers = bytes(int(t) for t in batch.targets[batch.targets != IGNORED] if t < 256)
    assert answers.startswith(b"on the host\non disk\non the host")


def test_a_folder_without_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        FolderTokenizer(tmp_path / "none")
    with pytest.raises(DataError, match="no tokenizer can be read") as caught:
        FolderTokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')  # of which transformers makes an empty tokenizer
    with pytest.raises(DataError, match=r"no vocabulary but 1 special tokens\. .*--tokenizer PATH"):
        FolderTokenizer(tmp_path)
