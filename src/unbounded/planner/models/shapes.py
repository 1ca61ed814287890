"""The shape of a language model: layers, hidden size, vocabulary and whatever else decides its bytes and FLOPs.

A shape comes from `layers=24,hidden=2048`, from the name of a preset, or from a `config.json` (`configs`). It knows
the parameters of each block; `footprint` makes units of it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from unbounded.errors import PlanError
from unbounded.planner.spelling import find_closest

# Sizes beyond those of any model, which would only keep the planner busy.
MOST_LAYERS, MOST = 10_000, 10**9
MOST_RANK = 1 << 16  # of adapters
_MAY_BE_0 = {"positions", "head_dim", "extra", "outside", "token_width", "norm_vectors"}


@dataclass(frozen=True)
class Shape:
    """A decoder (or encoder) of equal blocks. `ffn` is the width inside the feed-forward part, `gated` whether that
    has three matrices (SwiGLU), `experts` how many of them there are and `active` how many a token passes."""

    name: str
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool = True
    biased: bool = False  # linear layers have biases
    qkv_biased: bool = False
    norms: int = 2  # of a block
    norm_vectors: int = 1  # weights per norm and element: 1 for RMSNorm, 2 for LayerNorm with its bias
    head_dim: int = 0
    positions: int = 0  # rows of a learned position table
    tied: bool = False
    experts: int = 1
    active: int = 1
    extra: int = 0  # other parameters of a block: norms of queries and keys
    outside: int = 0  # other parameters outside blocks: a norm after the embedding
    token_width: int = 0  # of embedding and head, if it is not `hidden`; a layer without bias then leads in and out
    last_norm: bool = True

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type == "int" and (value < 0 or (value == 0 and item.name not in _MAY_BE_0)):
                raise PlanError(f"{item.name} is {value}. A model needs at least 1 of it.")
            most = MOST_LAYERS if item.name == "layers" else MOST
            if item.type == "int" and value > most:
                raise PlanError(f"{item.name} is more than any model has. Give at most {most:,}.")
        if self.heads > self.hidden and not self.head_dim:
            raise PlanError(f"there are {self.heads} heads for a width of {self.hidden}. Give fewer, or head_dim.")
        if self.heads % self.kv_heads:
            raise PlanError(f"kv_heads is {self.kv_heads}, but it must divide the {self.heads} heads.")
        if self.active > self.experts:
            raise PlanError(f"a token passes {self.active} experts, but a block has {self.experts}. Give fewer.")

    @property
    def attention_width(self) -> int:
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        return self.kv_heads * (self.head_dim or self.hidden // self.heads)

    @property
    def expert_numel(self) -> int:
        matrices = (3 if self.gated else 2) * self.hidden * self.ffn
        return matrices + (self.ffn_bias_numel if self.biased else 0)

    @property
    def ffn_bias_numel(self) -> int:
        """Biases of a feed-forward part in which all layers have one."""
        return self.ffn * (2 if self.gated else 1) + self.hidden

    @property
    def attention_bias_numel(self) -> int:
        """Biases of an attention in which all layers have one."""
        return self.attention_width + 2 * self.kv_width + self.hidden

    @property
    def attention_numel(self) -> int:
        wide, narrow = self.attention_width, self.kv_width
        numel = self.hidden * (wide + 2 * narrow) + wide * self.hidden
        if self.biased:
            numel += self.attention_bias_numel
        elif self.qkv_biased:
            numel += wide + 2 * narrow
        return numel

    @property
    def linear_sizes(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of the linear layers of a block, without experts, whose matrices are stacked."""
        attention = [(self.hidden, width) for width in (self.attention_width, self.kv_width, self.kv_width)]
        dense = [(self.hidden, self.ffn)] * (2 if self.gated else 1) + [(self.ffn, self.hidden)]
        return (*attention, (self.attention_width, self.hidden), *(dense if self.experts == 1 else ()))

    @property
    def router_numel(self) -> int:
        return self.hidden * self.experts if self.experts > 1 else 0

    @property
    def block_numel(self) -> int:
        norms = self.norms * self.norm_vectors * self.hidden
        return self.attention_numel + self.experts * self.expert_numel + self.router_numel + norms + self.extra

    @property
    def embedding_numel(self) -> int:
        return self.tokens_numel + self.positions * self.hidden

    @property
    def tokens_numel(self) -> int:
        """The matrix of the embedding, and that of the head."""
        return self.vocabulary * (self.token_width or self.hidden)

    @property
    def head_numel(self) -> int:
        return 0 if self.tied else self.tokens_numel

    @property
    def numel(self) -> int:
        return self.layers * self.block_numel + self.embedding_numel + self.head_numel + self.root_numel

    @property
    def root_numel(self) -> int:
        """The last norm, and other parameters outside blocks."""
        norm = self.norm_vectors * self.hidden if self.last_norm else 0
        return norm + self.outside + 2 * self.token_width * self.hidden

    @property
    def block_products(self) -> int:
        """Elements of the matrices that one token is multiplied with in a block."""
        width = self.hidden * (self.attention_width + 2 * self.kv_width) + self.attention_width * self.hidden
        return width + self.active * (3 if self.gated else 2) * self.hidden * self.ffn + self.router_numel


def make_shape(*, layers: int, hidden: int, **more: int) -> Shape:
    """A shape from layers and hidden size; everything else is as in GPT unless it is given."""
    heads, gated = more.get("heads", max(1, hidden // 128)), bool(more.get("gated", 0))
    values = {
        "vocabulary": 50257,
        "heads": heads,
        "kv_heads": heads,
        "ffn": 256 * -(-8 * hidden // (3 * 256)) if gated else 4 * hidden,
        "gated": gated,
        "biased": not gated,
        "norm_vectors": 1 if gated else 2,
    }
    sizes: dict[str, Any] = {**values, **more}
    return Shape(name=f"layers={layers},hidden={hidden}", layers=layers, hidden=hidden, **sizes)


def _llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int) -> Shape:
    return Shape(name, layers, hidden, vocabulary, heads, kv_heads, ffn)


def _gpt(name: str, layers: int, hidden: int, heads: int, vocabulary: int = 50257, positions: int = 2048) -> Shape:
    return Shape(
        name, layers, hidden, vocabulary, heads, heads, 4 * hidden,
        gated=False, biased=True, norm_vectors=2, positions=positions, tied=True,
    )  # fmt: skip


PRESETS = {
    shape.name: shape
    for shape in (
        _gpt("gpt2", 12, 768, 12, positions=1024),
        _gpt("gpt2-xl", 48, 1600, 25, positions=1024),
        _gpt("gpt3-175b", 96, 12288, 96),
        _gpt("gpt-1t", 128, 25600, 160, vocabulary=51200),
        _llama("llama-1b", 24, 2048, 16, 16, 5504, 32000),
        _llama("llama-3b", 26, 3072, 24, 24, 8192, 32000),
        _llama("llama-7b", 32, 4096, 32, 32, 11008, 32000),
        _llama("llama-8b", 32, 4096, 32, 8, 14336, 128256),
        _llama("llama-13b", 40, 5120, 40, 40, 13824, 32000),
        _llama("llama-22b", 48, 6144, 48, 48, 16512, 32000),
        _llama("llama-70b", 80, 8192, 64, 8, 28672, 128256),
        _llama("llama-405b", 126, 16384, 128, 8, 53248, 128256),
    )
}


def read_shape(text: str) -> Shape:
    """A preset by name, or `layers=..,hidden=..` with any other field of a shape."""
    if "=" not in text:
        if text in PRESETS:
            return PRESETS[text]
        closest = find_closest(text, PRESETS)
        hint = f"Did you mean {closest!r}?" if closest else f"The presets are {', '.join(PRESETS)}."
        raise PlanError(
            f"{text!r} is not a config folder, a config.json or a preset. {hint} Or give layers=..,hidden=.. by hand."
        )
    values: dict[str, int] = {}
    known = [item.name for item in fields(Shape) if item.name != "name"]
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in known:
            closest = find_closest(key, known)
            hint = f"Did you mean {closest!r}?" if closest else f"The keys are {', '.join(known)}."
            raise PlanError(f"a model has no {key!r}. {hint}")
        if not value.isdecimal() or len(value) > 12:
            raise PlanError(f"{key} is {value!r}, but it must be a whole number of at most 12 digits.")
        if key in values:
            raise PlanError(f"{key} is given twice: {values[key]} and {value}. Give it once.")
        values[key] = int(value)
    for key in ("layers", "hidden"):
        if key not in values:
            raise PlanError(f"{text!r} leaves out {key}. Give at least layers=..,hidden=..")
    return make_shape(**values)
