"""Makes the folder that BERT-Large starts from: its configuration, and a WordPiece vocabulary learned from your text.

    python examples/bert_folder.py models/bert-large data/*.txt

A folder of your own with a config.json and a tokenizer does as well.
"""

from __future__ import annotations

import argparse

from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertTokenizerFast

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder")
parser.add_argument("text", nargs="+", help="files to learn the vocabulary from")
parser.add_argument("--vocabulary", type=int, default=30_522)
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--heads", type=int, default=16)
options = parser.parse_args()

learned = BertWordPieceTokenizer(lowercase=True)
learned.train(options.text, vocab_size=options.vocabulary, show_progress=False)
tokenizer = BertTokenizerFast(tokenizer_object=learned._tokenizer)
tokenizer.save_pretrained(options.folder)
config = BertConfig(
    vocab_size=-(-len(tokenizer) // 64) * 64,  # a round number of rows: faster matmuls over the vocabulary
    hidden_size=options.width,
    num_hidden_layers=options.layers,
    num_attention_heads=options.heads,
    intermediate_size=4 * options.width,
    max_position_embeddings=512,
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
)
config.save_pretrained(options.folder)
print(f"{options.folder}: BERT of {options.layers} layers, {len(tokenizer)} tokens")
