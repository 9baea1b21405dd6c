"""The graph: frozen nodes in build order. Pure data; nothing here computes.

Activations are f32 and feature-fastest: shape `(d, n_tokens)` is `n_tokens` rows of `d` values, so the numpy array of a
value has the reversed shape. A weight of shape `(n_in, n_out)` is `n_out` rows of `n_in` values, as in a GGUF file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Shape = tuple[int, ...]
DType = Literal["f32", "i32", "none"]
RopeStyle = Literal["norm", "neox"]
Epilogue = Literal["none", "bias", "add", "swiglu", "geglu"]

WINDOW_LAYOUTS = {0: "causal", 2: "span", 8: "map"}


@dataclass(frozen=True, slots=True)
class Weight:
    """A reference to a tensor of the model: its name, block format and GGUF shape. The backend resolves it to bytes."""

    name: str
    type: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary angles stretch beyond the trained context.

    `linear` divides every angle by `factor`. `yarn` (arXiv:2309.00071) interpolates slow dimensions by `factor`, keeps
    fast ones, and multiplies the rotated vector by `attn_factor * (1 + 0.1 ln factor)`.
    """

    kind: Literal["linear", "yarn"]
    factor: float
    original_context: int = 0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of one model: `norm` rotates neighbours (2i, 2i+1), `neox` rotates (i, i + n_dims/2).

    The first `n_dims` values of a head rotate, the rest pass. `freqs` (n_dims/2) divides the angles one by one
    (`rope_freqs.weight`: Llama 3's factors).
    """

    style: RopeStyle
    head_dim: int
    n_dims: int
    base: float
    scaling: RopeScaling | None = None
    freqs: Weight | None = None


@dataclass(frozen=True, slots=True)
class Op:
    """Base of all ops; `rules.RULES` says what each takes and gives."""


@dataclass(frozen=True, slots=True)
class Input(Op):
    """Filled by the engine before a run. A model has token_ids, positions, cells, window and tail_ids."""

    kind: str


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """Rows of a weight by token id."""

    weight: Weight


@dataclass(frozen=True, slots=True)
class GetRows(Op):
    """The rows of an activation that are asked for."""


@dataclass(frozen=True, slots=True)
class RmsNorm(Op):
    """x / sqrt(mean(x^2) + eps) * weight, over the features of a token."""

    weight: Weight
    eps: float


@dataclass(frozen=True, slots=True)
class HeadNorm(Op):
    """RMSNorm over each head of `weight.shape[0]` values (Qwen3, Gemma 3)."""

    weight: Weight
    eps: float


@dataclass(frozen=True, slots=True)
class MatMul(Op):
    """x times a weight, plus a bias."""

    weight: Weight
    bias: Weight | None = None


@dataclass(frozen=True, slots=True)
class Rope(Op):
    """Rotates every head by its token's position (arXiv:2104.09864)."""

    spec: RopeSpec


@dataclass(frozen=True, slots=True)
class KvStore(Op):
    """Writes K and V rows of a layer into the cells given; it has no value of its own."""

    layer: int


@dataclass(frozen=True, slots=True)
class Attn(Op):
    """softmax(q k^T * scale) v over the rows of each query's window; `sliding` keeps the last W rows of it.

    `softcap` c replaces a score s by c tanh(s / c). Query head h reads KV head h // (n_head / n_kv_head).
    """

    layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    scale: float
    softcap: float | None = None
    sliding: int | None = None


@dataclass(frozen=True, slots=True)
class Silu(Op):
    """x * sigmoid(x)."""


@dataclass(frozen=True, slots=True)
class Gelu(Op):
    """GELU in its tanh form (arXiv:1606.08415), as Gemma uses it."""


@dataclass(frozen=True, slots=True)
class Add(Op):
    """x + y."""


@dataclass(frozen=True, slots=True)
class Mul(Op):
    """x * y."""


@dataclass(frozen=True, slots=True)
class Scale(Op):
    """x * factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Softmax(Op):
    """Softmax over the features of a token."""


@dataclass(frozen=True, slots=True)
class SoftCap(Op):
    """cap * tanh(x / cap)."""

    cap: float


@dataclass(frozen=True, slots=True)
class TopK(Op):
    """The k largest values of each row, largest first, the lowest index of equal ones first.

    NaN and Inf come before every number, so one of them anywhere in a row shows in its first place. A row of the value
    is 2k + 1 words: the k indices, the bits of their f32 values, the bits of log(sum(exp(row))) as f32.
    """

    k: int


@dataclass(frozen=True, slots=True)
class View(Op):
    """Features `[start, start + size)` of every token."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Reshape(Op):
    """The same values in order, in another shape."""

    shape: Shape


@dataclass(frozen=True, slots=True)
class Permute(Op):
    """Axis i of the result is axis `axes[i]` of the input."""

    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwiGLU(Op):
    """silu(gate) * up."""


@dataclass(frozen=True, slots=True)
class GeGLU(Op):
    """gelu(gate) * up."""


@dataclass(frozen=True, slots=True)
class Project(Op):
    """Up to three weights applied to one input in one launch, their results side by side on the feature axis.

    `norm` (gain, eps) is applied to the input first. Epilogues: `bias` adds `biases` (one a segment), `add` adds a
    second input, `swiglu` and `geglu` join two segments (gate, up) into one result.
    """

    segments: tuple[Weight, ...]
    norm: tuple[Weight, float] | None = None
    epilogue: Epilogue = "none"
    biases: tuple[Weight, ...] = ()


@dataclass(frozen=True, slots=True)
class HeadRopeStore(Op):
    """From q, k and v side by side: biases, head norms and rope; stores K and V; gives the rotated q."""

    layer: int
    n_head: int
    n_kv_head: int
    rope: RopeSpec
    biases: tuple[Weight, Weight, Weight] | None = None
    q_norm: tuple[Weight, float] | None = None
    k_norm: tuple[Weight, float] | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One step: its op, the earlier nodes it reads, and the logical shape and type of its value."""

    index: int
    name: str
    op: Op
    inputs: tuple[int, ...]
    shape: Shape
    dtype: DType
    layer: int | None = None
    device: str = ""

    def on(self, device: str) -> Node:
        """The same node placed on a device."""
        return Node(self.index, self.name, self.op, self.inputs, self.shape, self.dtype, self.layer, device)

    @property
    def n_elements(self) -> int:
        n = 1
        for extent in self.shape:
            n *= extent
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of the value; from the logical shape, never from a buffer."""
        return 0 if self.dtype == "none" else 4 * self.n_elements

    @property
    def weights(self) -> tuple[Weight, ...]:
        return weights_of(self.op)

    @property
    def kind(self) -> str:
        return type(self.op).__name__


@dataclass(frozen=True, slots=True)
class Placement:
    """Which device runs the embedding, each layer, and what follows the last layer."""

    embed: str
    layers: tuple[str, ...]
    output: str

    @classmethod
    def whole(cls, device: str, n_layers: int) -> Placement:
        return cls(device, (device,) * n_layers, device)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.embed, *self.layers, self.output)))


@dataclass(frozen=True, slots=True)
class GraphParams:
    """Everything a graph depends on; equal params give an equal graph.

    `window` is the number of int32 values a query has in the window input: 0 (causal: one sequence whose cell equals
    its position), 2 (one `[lo, hi)` cell range) or 8 (four `(cell, length)` runs in position order).
    `n_outputs` rows leave the last layer: all of them in order where it equals `n_tokens`, else those of `tail_ids`;
    with 0 the graph only fills the KV cache. `top_k` makes the `TopK` of the logits the output instead of all of them.
    """

    n_tokens: int
    n_outputs: int
    placement: Placement
    kv_format: str = "f32"
    window: int = 0
    unfused: frozenset[str] = frozenset()
    trace: bool = False
    top_k: int | None = None


@dataclass(frozen=True)
class Graph:
    """Nodes in build order, which is the order of execution, and the indices of the values asked for."""

    params: GraphParams
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def consumers(self) -> Mapping[int, tuple[int, ...]]:
        """Node index -> the nodes that read it, in build order."""
        users: dict[int, list[int]] = {node.index: [] for node in self.nodes}
        for node in self.nodes:
            for source in dict.fromkeys(node.inputs):
                users[source].append(node.index)
        return {index: tuple(found) for index, found in users.items()}


@dataclass(slots=True)
class Renumber:
    """Collects nodes that were kept, replaced or new, and renumbers their inputs as it goes."""

    nodes: list[Node] = field(default_factory=list)
    index: dict[int, int] = field(default_factory=dict)

    def add(self, node: Node, *replaces: int) -> None:
        """Append `node`, whose inputs are old indices; it stands for the old indices `replaces` too."""
        new, inputs = len(self.nodes), tuple([self.index[i] for i in node.inputs])
        self.nodes.append(Node(new, node.name, node.op, inputs, node.shape, node.dtype, node.layer, node.device))
        for old in (node.index, *replaces):
            self.index[old] = new


def weights_of(op: Op) -> tuple[Weight, ...]:
    """Every weight that an op names, in field order."""
    found: list[Weight] = []

    def walk(value: Any) -> None:
        if isinstance(value, Weight):
            found.append(value)
        elif isinstance(value, tuple):
            for item in value:
                walk(item)
        elif isinstance(value, RopeSpec):
            walk(value.freqs)

    for entry in dataclasses.fields(op):
        walk(getattr(op, entry.name))
    return tuple(found)


def describe(value: Any) -> Any:
    """An op, spec or weight as plain data, for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [describe(item) for item in value]
    return value
