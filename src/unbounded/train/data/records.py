"""Turns records into documents: which fields of a JSON object or Parquet row hold the text, the turns, or the pair.

| kind | fields | a document is |
|---|---|---|
| text | `text` | the text |
| chat | `messages`: `role`, `content` | the conversation |
| sharegpt | `conversations`: `from`, `value` | the conversation |
| alpaca | `instruction`, `input`, `output` | a conversation of one question and one answer |
| prompt | `prompt`, `completion` | the pair; for lists of messages, the conversation and where its completion begins |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from unbounded.errors import DataError
from unbounded.planner.spelling import did_you_mean

TEXT, CHAT, SHAREGPT, ALPACA, PROMPT = "text", "chat", "sharegpt", "alpaca", "prompt"
Message = dict[str, str]


class Prompted(NamedTuple):
    """A text and its completion; the loss covers only the completion."""

    prompt: str
    completion: str


class Continued(NamedTuple):
    """A conversation; the loss covers only answers from message number `first` on."""

    messages: list[Message]
    first: int


Document = str | list[Message] | Prompted | Continued
Where = Callable[[], str]

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
_SPEAKERS = (("role", "content"), ("from", "value"))
_UNREAD_BESIDE = ("tools", "system", "history", "chat_template_kwargs")
_UNREAD = ("tool_calls", "function_call", "reasoning_content", "thinking")
_RENDER = 'Render the conversations yourself, and give their "prompt" and "completion" or their "text".'


@dataclass(frozen=True)
class RecordKind:
    """How records are read; `fields` must be there, `optional` may be."""

    name: str
    fields: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def check_fields(self, present: Collection[str], where: Where, noun: str) -> None:
        """Raises if a field is missing, and names the fields that are there."""
        missing = next((name for name in self.fields if name not in present), None)
        if missing is not None:
            known = [str(name) for name in present]
            raise DataError(
                f'{where()} has no {noun} "{missing}".{did_you_mean(missing, known)} Its {noun}s are {known}; name the '
                "right one with --text-field or --messages-field, or the kind of data with --data-format."
            )

    def read(self, record: Mapping[str, Any], where: Where) -> Document:
        """The document of one record."""
        values = [record[name] for name in self.fields]
        if self.name == TEXT:
            return _text(values[0], self.fields[0], where)
        unread = next((key for key in _UNREAD_BESIDE if record.get(key)), None)
        if unread is not None:
            raise DataError(f'{where()} has "{unread}", which would be left out. {_RENDER}')
        if self.name in (CHAT, SHAREGPT):
            return _messages(values[0], self.fields[0], where)
        if self.name == ALPACA:
            question, answer = (_text(v, n, where) for v, n in zip(values, self.fields, strict=True))
            more = record.get("input") or ""
            asked = f"{question}\n\n{_text(more, 'input', where)}" if more else question
            return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        if all(isinstance(value, list) for value in values):
            prompt, completion = (_messages(v, n, where) for v, n in zip(values, self.fields, strict=True))
            return Continued([*prompt, *completion], len(prompt))
        return Prompted(*(_text(v, n, where) for v, n in zip(values, self.fields, strict=True)))


def has_answer(document: Document) -> bool:
    """Whether there is something to train on: all of a text, a completion, or the assistant's turns."""
    return isinstance(document, (str, Prompted)) or bool(find_answers(document))


def find_answers(document: list[Message] | Continued) -> list[int]:
    """The numbers of the messages to train on."""
    messages, first = document if isinstance(document, Continued) else (document, 0)
    return [number for number in range(first, len(messages)) if messages[number]["role"] == "assistant"]


def kind_named(name: str, text_field: str, messages_field: str | None) -> RecordKind:
    """The kind of a format, with the user's names for its fields."""
    if name == CHAT:
        return RecordKind(CHAT, (messages_field or "messages",), _UNREAD_BESIDE)
    if name == SHAREGPT:
        return RecordKind(SHAREGPT, (messages_field or "conversations",), _UNREAD_BESIDE)
    if name == ALPACA:
        return RecordKind(ALPACA, ("instruction", "output"), ("input", *_UNREAD_BESIDE))
    if name == PROMPT:
        return RecordKind(PROMPT, ("prompt", "completion"), _UNREAD_BESIDE)
    return RecordKind(TEXT, (text_field,))


def recognise(fields: Collection[str], text_field: str, messages_field: str | None) -> RecordKind:
    """The first kind whose fields the record all has; text if none fits."""
    for name in (CHAT, SHAREGPT, ALPACA, PROMPT):
        kind = kind_named(name, text_field, messages_field)
        if all(field in fields for field in kind.fields):
            return kind
    return kind_named(TEXT, text_field, messages_field)


def _text(value: Any, name: str, where: Where) -> str:
    if not isinstance(value, str):
        raise DataError(f'{where()}: "{name}" holds {type(value).__name__}, not text.')
    return value


def _messages(value: Any, name: str, where: Where) -> list[Message]:
    if isinstance(value, list):
        for speaker, content in _SPEAKERS:
            if all(isinstance(turn, dict) and {speaker, content} <= turn.keys() for turn in value):
                return [
                    {
                        "role": _ROLES.get(str(turn[speaker]), str(turn[speaker])),
                        "content": _content(turn, content, where),
                    }
                    for turn in value
                ]
    raise DataError(
        f'{where()}: "{name}" is not a list of messages with "role" and "content", nor with "from" and "value".'
    )


def _content(turn: Mapping[str, Any], name: str, where: Where) -> str:
    """What is said in a turn: a text, or the texts of its parts, one after another."""
    unread = next((key for key in _UNREAD if turn.get(key)), None)
    if unread is None:
        unread = next((key for key in ("weight", "train") if turn.get(key) not in (None, 1)), None)
    if unread is not None:
        raise DataError(f'{where()}: a message has "{unread}", but only its "{name}" would be trained on. {_RENDER}')
    said = turn[name]
    parts = said if isinstance(said, list) else ["" if said is None else said]
    return "".join(_part(part, name, where) for part in parts)


def _part(part: Any, name: str, where: Where) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        kind = f'a part of type "{part.get("type")}"' if isinstance(part, dict) else type(part).__name__
        raise DataError(f'{where()}: the "{name}" of a message holds {kind}, not text. Leave out such records.')
    return text
