"""The memory of one trainer rank, predicted from a model's `config.json`, the layout and the settings.

Plain arithmetic over the tensors that a step keeps, so that the placement, `rollart check`, the simulator and the
planner use one model. What a rank always holds (master weights, gradients, moments, reference) is added to the largest
of what it holds for a while: the scorer's chunk, the reduction of the head's gradient, the backward pass of one layer.
`benchmarks/memory.py` compares it with the peak of real processes. Not counted: the runtime (CUDA context, NCCL and
allocator), for which `USABLE` leaves room.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollart.core.errors import RollartError
from rollart.hardware.layout import SINGLE, Layout

LOGITS_AT_ONCE = 1 << 22  # of the scorer's chunks: what a CPU's caches hold in part
ROWS_AT_ONCE = 256  # at least, for matrix products that are worth the reading of the weight
USABLE = 0.9  # fraction of a device's memory; the runtime and its temporaries take the rest
_MASTER = 4  # bytes: master weights and gradients are float32
_ADAMW = 8  # bytes of state per parameter: two moments in float32
_KERNEL = 0.58e6  # bytes of a bfloat16 matrix product that oneDNN keeps, whatever its size: measured
_KERNELS = 1024  # that oneDNN keeps at most
_STATE = {"muon": 4.0, "adamw_8bit": 2 + 2 * 4 / 256}  # of matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """What decides the memory besides the model. `longest` is the longest sequence: one beyond `pack_tokens` is a pass
    of its own. `adapters` are the parameters that LoRA trains, 0 if all are; the others are then kept in the dtype of
    computation. `flash`: attention works on the flat layout, as on GPUs in bfloat16, and needs no copies of what it
    reads. `gloo`: ranks on CPUs, which copy what they reduce, and in bfloat16 keep a kernel for each shape of a matrix
    product. `pass_sizes` is how many different numbers of tokens their passes have: each has its own kernels."""

    layout: Layout = SINGLE
    dtype: str = "float32"
    recompute: str = "none"
    offload: tuple[str, ...] = ()
    optimizer: str = "adamw"
    pack_tokens: int = 8192
    longest: int = 0
    reference: bool = False
    critic: bool = False
    adapters: int = 0
    flash: bool = False
    gloo: bool = False
    pass_sizes: int = _KERNELS

    @property
    def tokens(self) -> int:
        return max(self.pack_tokens, self.longest)

    @property
    def number(self) -> int:
        """Bytes of a number in the forward pass."""
        return 2 if self.dtype == "bfloat16" else 4


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes of one rank at its peak. `activations` are those kept for the backward pass; `working` is what the moment
    of the peak adds: gathered weights, recomputed activations, logits, kernels of CPUs. `host` is what offloading keeps
    in the memory of the host, which is not in the total. `critic` are its weights and moments: its gradients and
    activations are there when the policy's are not."""

    parameters: float
    gradients: float
    optimizer: float
    reference: float
    activations: float
    working: float
    critic: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        held = self.parameters + self.gradients + self.optimizer + self.reference + self.critic
        return held + self.activations + self.working


@dataclass(frozen=True, slots=True)
class Decoder:
    """The sizes of a decoder with gated feed-forward layers (Llama, Qwen, ...)."""

    layers: int
    hidden: int
    query: int
    kv: int
    inner: int
    vocabulary: int
    tied: bool
    experts: int
    chosen: int
    head_norms: bool
    heads: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Decoder":
        """From `config.json`. Raises RollartError."""
        try:
            hidden, heads = config["hidden_size"], config["num_attention_heads"]
            experts = config.get("num_experts") or config.get("num_local_experts") or 0
            inner = (config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"]
            head_dim = config.get("head_dim") or hidden // heads
            return cls(
                layers=config["num_hidden_layers"],
                hidden=hidden,
                query=heads * head_dim,
                kv=(config.get("num_key_value_heads") or heads) * head_dim,
                inner=inner,
                vocabulary=config["vocab_size"],
                tied=bool(config.get("tie_word_embeddings")),
                experts=experts,
                chosen=config.get("num_experts_per_tok") or 0,
                head_norms=str(config.get("model_type", "qwen3")).startswith("qwen3"),
                heads=heads,
            )
        except KeyError as missing:
            raise RollartError(f"the model's config.json has no {missing}, which its memory depends on") from None

    @property
    def table(self) -> int:
        """Parameters of the embedding, and of an output head of its own."""
        return self.vocabulary * self.hidden

    @property
    def matrices(self) -> int:
        """Parameters of a layer that tensor parallelism splits: all but norms, router and experts."""
        attention = 2 * self.hidden * (self.query + self.kv)
        return attention + (0 if self.experts else 3 * self.hidden * self.inner)

    @property
    def mixture(self) -> int:
        """Parameters of the experts of a layer."""
        return 3 * self.hidden * self.inner * self.experts

    @property
    def router(self) -> int:
        return self.hidden * self.experts

    def adapters(self, rank: int, targets: Iterable[str] | None = None) -> int:
        """Parameters that LoRA adds to the linear layers of these names, of all if not given."""
        inner = 0 if self.experts else self.inner
        sizes = {"q_proj": self.query, "k_proj": self.kv, "v_proj": self.kv, "o_proj": self.query}
        sizes |= {name: inner for name in ("gate_proj", "up_proj", "down_proj") if inner}
        return self.layers * rank * sum(self.hidden + sizes.get(name, 0) for name in targets or sizes)

    @property
    def parameters(self) -> int:
        layer = self.matrices + self.mixture + self.router
        return self.layers * layer + self.table * (1 if self.tied else 2)


def scorer_rows(columns: float) -> int:
    """Rows of one chunk of the scorer, on a rank that has `columns` of the vocabulary."""
    return max(ROWS_AT_ONCE, int(LOGITS_AT_ONCE // columns))


def training_memory(config: Mapping[str, Any], setup: TrainingSetup) -> TrainingMemory:
    """Raises RollartError if the `config.json` has not what this needs."""
    return _Rank(Decoder.of(config), setup).memory()


class _Rank:
    """All sizes are bytes of one rank; `tokens` are those of its slice of the sequence."""

    def __init__(self, model: Decoder, setup: TrainingSetup) -> None:
        self._model, self._setup = model, setup
        layout = setup.layout
        self._number = setup.number
        self._tokens = -(-setup.tokens // layout.context)
        self._fsdp = layout.ranks > 1 or setup.number == 2 or "optimizer" in setup.offload
        # What FSDP gathers of a layer, and of the head: elements after tensor and expert parallelism.
        experts = model.mixture / (layout.expert if layout.expert > 1 else layout.tensor)
        self._layer = model.matrices / layout.tensor + model.router + experts
        self._table = model.table / layout.tensor

    def memory(self) -> TrainingMemory:
        model, setup, layout = self._model, self._setup, self._setup.layout
        trained = _MASTER * (setup.adapters or model.parameters) / layout.ranks
        held = trained + (self._number * model.parameters / layout.ranks if setup.adapters else 0)
        reference = held if setup.reference and not setup.adapters else 0.0  # without adapters a model is its reference
        kept, host = self._kept(), 0.0
        if "activations" in setup.offload:
            kept, host = 0.0, kept
        parts = {"parameters": held, "gradients": trained, "optimizer": trained / _MASTER * self._state()}
        if "optimizer" in setup.offload:
            host += sum(parts.values())
            parts = dict.fromkeys(parts, 0.0)
        working = max(self._moments()) + self._kernels()
        critic = self._critic(trained) if setup.critic else 0.0
        if "optimizer" in setup.offload:
            host, critic = host + critic, 0.0
        return TrainingMemory(**parts, reference=reference, activations=kept, working=working, critic=critic, host=host)

    def _critic(self, gradients: float) -> float:
        """A decoder without its output head, trained whole: beside adapters its gradients are the larger ones."""
        model, setup = self._model, self._setup
        size = (model.parameters - (0 if model.tied else model.table)) / setup.layout.ranks
        return size * (_MASTER + _STATE.get(setup.optimizer, _ADAMW)) + max(0.0, _MASTER * size - gradients)

    def _state(self) -> float:
        """Bytes of the optimizer's state per trained parameter. Muon leaves the tables to AdamW."""
        model, optimizer = self._model, self._setup.optimizer
        state = _STATE.get(optimizer, _ADAMW)
        if optimizer != "muon" or self._setup.adapters:
            return state
        tables = model.table * (1 if model.tied else 2) / model.parameters
        return state + (_ADAMW - state) * tables

    @property
    def _tail(self) -> float:
        """Elements that stay gathered from the forward pass to the backward pass: the head, and on one data-parallel
        rank the embedding, which is then in the same group."""
        together = self._setup.layout.shards == 1 and not self._model.tied
        return self._table * (2 if together else 1)

    # Activations

    def _kept(self) -> float:
        """Of all layers, and the states that the head reads."""
        model, tokens, number = self._model, self._tokens, self._number
        each = {"none": self._saved(), "selective": self._dear(), "full": 0.0}[self._setup.recompute]
        if self._setup.recompute != "none":
            each += model.hidden * number
        rotary = 2 * number * model.query / model.heads
        return tokens * (model.layers * each + rotary + self._norm() + model.hidden * number)

    def _norm(self) -> float:
        """What a norm of the hidden states keeps for one token: its unit vector and its output; without our own norm
        (under tensor parallelism) also its input in float32."""
        own = self._model.hidden * self._number * 2
        return own + (4 * self._model.hidden if self._setup.layout.tensor > 1 else 0)

    def _saved(self) -> float:
        """Bytes that one token keeps in one layer, with nothing recomputed."""
        model, setup, number = self._model, self._setup, self._number
        tensor, context = setup.layout.tensor, setup.layout.context
        query, kv = model.query / tensor, model.kv / tensor
        repeated = query if (kv * model.heads / model.query) % context else kv  # each query head brings its own
        grid = 0 if setup.flash else query  # the flat copy of what attention returns
        attention = 2 * query + grid + 2 * repeated
        wide = (4 - number) * (2 * query + 2 * repeated) if setup.gloo else 0  # CPUs attend in float32
        if model.head_norms:
            attention += query + kv
        norms = 2 * self._norm()
        slow = 4 * (query + kv) if tensor > 1 and model.head_norms else 0
        scores = 4 * model.heads / tensor
        return norms + slow + scores + number * attention + wide + self._feed_forward()

    def _feed_forward(self) -> float:
        model, number, layout = self._model, self._number, self._setup.layout
        if not model.experts:
            return 4 * number * model.inner / layout.tensor
        # Per chosen expert: its input, gate and up, their product and factor, its output. Tokens that other ranks send
        # are as many as this one sends, if the router balances.
        inner = model.inner / (layout.tensor if layout.expert == 1 else 1)
        slices = layout.tensor if layout.expert > 1 else 1
        sent = 1 if layout.expert > 1 else 0
        routing = 4 * model.experts + 5 * 8 * model.chosen
        return model.chosen * number * (2 * model.hidden + 4 * inner + sent * model.hidden) / slices + routing

    def _dear(self) -> float:
        """Of `selective`: what matrix products and attention return."""
        model, number, tensor = self._model, self._number, self._setup.layout.tensor
        attention = (2 * model.query + 2 * model.kv) / tensor + model.hidden
        forward = 0.0 if model.experts else 2 * model.inner / tensor + model.hidden
        return number * (attention + forward) + 4 * model.heads / tensor

    # What is held for a while

    def _kernels(self) -> float:
        """What oneDNN keeps for bfloat16 on CPUs: of each shape of a linear layer the forward pass and the gradients of
        input and weight, for each size of a pass, and the forward pass of the check at the start. Not those of experts.
        """
        model, setup, tensor = self._model, self._setup, self._setup.layout.tensor
        if not (setup.gloo and self._number == 2):
            return 0.0
        query, kv, inner = model.query / tensor, model.kv / tensor, model.inner / tensor
        into = {query, kv} | (set() if model.experts else {inner})
        out = into - {kv}
        linear = len({(model.hidden, size) for size in into} | {(size, model.hidden) for size in out}) + 1  # the head
        adapters = len(out | {model.hidden}) + len(into | {model.hidden}) if setup.adapters else 0
        each = linear * (2 if setup.adapters else 3) + 3 * adapters
        return _KERNEL * min(_KERNELS, setup.pass_sizes * each + linear + adapters)

    def _moments(self) -> Iterator[float]:
        yield self._scoring_forwards()
        yield self._scoring()
        yield self._reducing_head()
        yield self._layer_backwards()

    def _gathered(self) -> float:
        return self._number * self._tail if self._fsdp else 0.0

    def _chunk(self) -> float:
        """Logits that are computed at once."""
        columns = self._model.vocabulary / self._setup.layout.tensor
        return min(self._tokens, scorer_rows(columns)) * columns

    def _scoring_forwards(self) -> float:
        """The forward pass of the head, the last to be gathered: FSDP frees the buffer of a gather at the next one."""
        buffer = self._gathered() if self._setup.layout.shards > 1 else 0.0
        return self._gathered() + buffer + self._chunk() * 2 * 4

    def _scoring(self) -> float:
        """The backward pass of the head: gradients of the weight and of one chunk, then of the states. CPUs add what a
        chunk gives in bfloat16 to the weight's gradient by way of a copy in float32."""
        setup, number = self._setup, self._number
        added = number + (4 if setup.gloo else 0) if number == 2 else 0
        chunk = self._chunk() * (2 * 4 + (2 if number == 2 else 0))
        weight = 0.0 if setup.adapters else self._table * (4 + added)
        return self._gathered() + chunk + weight + self._tokens * self._model.hidden * number

    def _reducing_head(self) -> float:
        """The gradient of the head, on its way to the shards. A tied one waits for the embedding's, at the end of the
        backward pass, when activations are gone."""
        model, setup, number = self._model, self._setup, self._number
        if setup.adapters:
            return 0.0
        reduced = 4 + 4 / setup.layout.shards + (4 if setup.gloo else 0) if self._fsdp else 0
        if model.tied:
            return self._gathered() + self._table * (2 * number + reduced) - self._kept()
        return self._gathered() + self._table * (number + reduced)

    def _layer_backwards(self) -> float:
        """Weights and gradients of the layer, and of the next that is gathered already; what it computes again, and the
        gradients of its activations."""
        model, setup, number, tokens = self._model, self._setup, self._number, self._tokens
        weights = self._gathered()
        if self._fsdp:
            weights += self._layer * (3 * number + (0 if setup.adapters else number + 4))
        if model.tied and not setup.adapters:
            weights += self._table * number
        again = {"none": 0.0, "selective": self._saved() - self._dear(), "full": self._saved()}[setup.recompute]
        if "activations" in setup.offload:
            again = self._saved()
        inner = 3 * model.inner / setup.layout.tensor * (model.chosen or 1)
        return weights + tokens * (max(0.0, again) + number * (inner + 2 * model.hidden))
