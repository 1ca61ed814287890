"""Turns documents into tokens with the targets of the loss.

Two tokenizers with one protocol: the bytes themselves, for the built-in model, and a Hugging Face tokenizer.
A conversation is rendered in segments with and without loss, each tokenised on its own, so that the loss begins
exactly where an answer does, as the text that it continues there:

1. the tokenizer's chat template, where each answer is what the template adds to the turns before it;
2. without a template: `<|role|>\\n`, the content, and for an answer the end-of-text token, one turn after another.

A prompt with its completion is the two texts, one after the other.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from unbounded.errors import DataError
from unbounded.train.data.records import Continued, Document, Message, Prompted, find_answers

IGNORED = -100
_BEFORE = "\n"  # stands before a text that follows another one: hardly any tokenizer joins it with what comes next
Ids = NDArray[np.int32]
# Half of a UTF-16 pair. JSON can hold one, where somebody cut a text in two, and no tokenizer of transformers takes it.
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


class Encoded(NamedTuple):
    """A document's tokens, and for each the id to predict there (`IGNORED` if there is none)."""

    tokens: Ids
    targets: Ids


class ChatSegment(NamedTuple):
    """A stretch of a rendered conversation; with `ends` the end-of-text token follows it."""

    text: str
    trained: bool
    ends: bool = False


class Tokenizer(Protocol):
    """What the data pipeline and the sampler need from a tokenizer."""

    name: str
    vocabulary_size: int

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """Tokens of each document, the end-of-text token after each."""

    def encode_prompt(self, text: str) -> list[int]:
        """Tokens of a text to be continued."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of generated tokens."""


class ByteTokenizer:
    """Every byte of UTF-8 is a token; 256 ends a document."""

    name = "bytes"
    vocabulary_size = 257
    end = 256

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """See `Tokenizer.encode`."""
        return [self._encode(document) for document in documents]

    def _encode(self, document: Document) -> Encoded:
        if isinstance(document, str):
            tokens = np.append(_bytes(document), np.int32(self.end))
            return Encoded(tokens, tokens)
        segments = _plain_segments(document)
        return _join(segments, [_bytes(segment.text) for segment in segments], self.end)

    def encode_prompt(self, text: str) -> list[int]:
        """See `Tokenizer.encode_prompt`."""
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return bytes(token for token in tokens if token < self.end).decode("utf-8", "replace")


class FolderTokenizer:
    """The tokenizer of a Hugging Face model folder."""

    def __init__(self, folder: str | Path) -> None:
        self.name = str(folder)
        self.inner = _load_tokenizer(folder)
        self.vocabulary_size = max(self.inner.get_vocab().values()) + 1
        begin, end = _first(self.inner, "bos", "cls"), _first(self.inner, "eos", "sep")
        if end is None:
            raise DataError(
                f'tokenizer "{folder}" has no end-of-text token. Set "eos_token" in its tokenizer_config.json.'
            )
        self.end = end
        self._begin = [begin] if begin is not None and self.inner("a")["input_ids"][:1] == [begin] else []
        self._fast = getattr(self.inner, "backend_tokenizer", None)
        if self._fast is not None:  # documents are whole, whatever length tokenizer.json cuts or pads texts to
            self._fast.no_truncation()
            self._fast.no_padding()
        self._puts_space = self._ids([_BEFORE + "a"])[0] != [*self._ids([_BEFORE])[0], *self._ids(["a"])[0]]

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """See `Tokenizer.encode`."""
        if documents and not isinstance(documents[0], str):
            return [self._encode_segments(document) for document in documents if not isinstance(document, str)]
        arrays = [np.array([*self._begin, *ids, self.end], np.int32) for ids in self._ids([str(d) for d in documents])]
        return [Encoded(tokens, tokens) for tokens in arrays]

    def encode_prompt(self, text: str) -> list[int]:
        """See `Tokenizer.encode_prompt`."""
        return [*self._begin, *self._ids([text])[0]]

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=True))

    def _ids(self, texts: list[str]) -> list[list[int]]:
        texts = [text if text.isascii() else _HALF_CHARACTER.sub("\ufffd", text) for text in texts]
        if self._fast is not None:  # straight to the Rust core: a third of the time under the interpreter's lock
            return [encoding.ids for encoding in self._fast.encode_batch(texts, add_special_tokens=False)]
        ids: list[list[int]] = self.inner(texts, add_special_tokens=False)["input_ids"]
        return ids

    def _continue(self, texts: list[str]) -> list[list[int]]:
        """Tokens of texts that follow another one: without the space that some tokenizers put before every text."""
        alone = self._ids(texts)
        if not self._puts_space:
            return alone
        (before,) = self._ids([_BEFORE])
        after = self._ids([_BEFORE + text for text in texts])
        cut = len(before)
        return [ids[cut:] if ids[:cut] == before else own for ids, own in zip(after, alone, strict=True)]

    def _encode_segments(self, document: list[Message] | Prompted | Continued) -> Encoded:
        renders = bool(self.inner.chat_template) and not isinstance(document, Prompted)
        segments = self._render(document) if renders else _plain_segments(document)  # type: ignore[arg-type]
        texts = [segment.text for segment in segments]
        first = next((index for index, text in enumerate(texts) if text), len(texts)) + 1
        ids = [*self._ids(texts[:first]), *self._continue(texts[first:])]
        if ids and not renders:
            ids[0] = [*self._begin, *ids[0]]
        return _join(segments, [np.array(piece, np.int32) for piece in ids], self.end)

    def _render(self, document: list[Message] | Continued) -> list[ChatSegment]:
        answers = find_answers(document)
        messages = document.messages if isinstance(document, Continued) else document
        if not answers:
            return [ChatSegment(self._template(messages, False), False)]
        segments = _template_segments(messages, answers, self._template)
        if segments is None:  # a template that rewrites earlier turns: the last answer still follows its prompt
            segments = _template_segments(messages[: answers[-1] + 1], answers[-1:], self._template)
        if segments is None:
            raise DataError(
                f'the chat template of "{self.name}" does not put answers after their prompt, so the loss cannot '
                "be limited to them. Render the conversations yourself and train on their text."
            )
        return segments

    def _template(self, messages: list[Message], asks: bool) -> str:
        if not messages:
            return ""
        try:
            return str(self.inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks))
        except Exception as error:  # the template is the user's program: Jinja raises whatever it likes
            raise DataError(f'the chat template of "{self.name}" refuses a conversation: {error}') from None


def _template_segments(messages: list[Message], answers: list[int], template: Any) -> list[ChatSegment] | None:
    segments, done = [], ""
    for index in answers:
        prompt, answered = template(messages[:index], True), template(messages[: index + 1], False)
        if not prompt.startswith(done) or not answered.startswith(prompt):
            return None
        segments += [ChatSegment(prompt[len(done) :], False), ChatSegment(answered[len(prompt) :], True)]
        done = answered
    return segments


def _plain_segments(document: list[Message] | Prompted | Continued) -> list[ChatSegment]:
    if isinstance(document, Prompted):
        return [ChatSegment(document.prompt, False), ChatSegment(document.completion, True, ends=True)]
    segments, trained = [], find_answers(document)
    for number, message in enumerate(document.messages if isinstance(document, Continued) else document):
        answers = message["role"] == "assistant"
        segments.append(ChatSegment(f"<|{message['role']}|>\n", False))
        segments.append(ChatSegment(f"{message['content']}\n", number in trained, ends=answers))
    return segments


def _join(segments: list[ChatSegment], pieces: list[Ids], end: int) -> Encoded:
    last = np.array([end], np.int32)
    tokens, targets = [], []
    for segment, ids in zip(segments, pieces, strict=True):
        ids = np.concatenate([ids, last]) if segment.ends else ids
        tokens.append(ids)
        targets.append(ids if segment.trained else np.full_like(ids, IGNORED))
    if np.concatenate([last[:0], *tokens])[-1:].tolist() != [end]:  # conversations are separated as texts are
        tokens.append(last)
        targets.append(np.full_like(last, IGNORED))
    return Encoded(np.concatenate(tokens), np.concatenate(targets))


def _bytes(text: str) -> Ids:
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)


def _first(tokenizer: Any, *names: str) -> int | None:
    """The first of these special tokens that a tokenizer has: BERT and its relatives use other names."""
    ids = (getattr(tokenizer, f"{name}_token_id", None) for name in names)
    return next((token for token in ids if token is not None), None)


def _load_tokenizer(folder: str | Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise DataError(f'tokenizer "{folder}" needs transformers. Install it: pip install "unbounded[hf]".') from None
    if not Path(folder).is_dir():
        raise DataError(f'tokenizer folder "{folder}" does not exist. Give a folder that from_pretrained can read.')
    remedy = "Put its files there (tokenizer.json), or name a folder that has them: --tokenizer PATH."
    try:
        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises a dozen kinds here; the user needs the one line
        reason = textwrap.shorten(str(error), 200, placeholder=" (...)").rstrip(".")
        raise DataError(f'no tokenizer can be read from "{folder}": {reason}. {remedy}') from None
    special = len(set(found.all_special_ids))
    if len(found.get_vocab()) <= special:  # what transformers makes of a model's configuration alone
        raise DataError(f'"{folder}" has no tokenizer: there is no vocabulary but {special} special tokens. {remedy}')
    return found
