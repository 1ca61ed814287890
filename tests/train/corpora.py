"""Small datasets, tokenizers and models made on the spot."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from unbounded.train.data.corpus import Corpus
from unbounded.train.data.document import Split, open_reader
from unbounded.train.data.source import open_source
from unbounded.train.data.tokenizer import ByteTokenizer, Tokenizer

WORDS = [
    "the",
    "unit",
    "moves",
    "from",
    "disk",
    "to",
    "host",
    "and",
    "from",
    "host",
    "to",
    "device",
    "while",
    "compute",
    "goes",
    "on",
    "while",
    "it",
    "in",
    "lanes",
]


def sentences(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [f"{i}: " + " ".join(draw.choices(WORDS, k=draw.randint(3, 40))) + "." for i in range(count)]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_texts(path: Path, count: int = 400) -> Path:
    return write_jsonl(path, [{"text": text} for text in sentences(count)])


def make_corpus(*paths: Path, tokenizer: Tokenizer | None = None, **options: Any) -> Corpus:
    data_format = options.pop("data_format", "auto")
    reader = open_reader(open_source([str(path) for path in paths], data_format), data_format, "text", None)
    options = {"split": Split(), "sequence_length": 32, "seed": 0} | options
    return Corpus(reader, tokenizer or ByteTokenizer(), **options)


def save_tokenizer(
    folder: Path, *, chat_template: str | None = None, begins: bool = False, vocabulary: int = 320
) -> Path:
    """A small byte-level BPE tokenizer in Hugging Face's layout."""
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<s>", "</s>", "<|turn|>"]
    core.train_from_iterator(
        sentences(200), trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=specials, initial_alphabet=alphabet)
    )
    if begins:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(folder)
    return folder


def save_model(folder: Path, *, chat_template: str | None = None) -> Path:
    """A tiny Llama with random weights, in two shards, and its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="150KB")
    return save_tokenizer(folder, chat_template=chat_template)
