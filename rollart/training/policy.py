"""The policy: a transformers causal LM that returns the log-probabilities of given tokens, spread over the ranks.

Each rank reads only its part of the weights from disk, with the sharding plans that transformers has for its models:
tensor and expert parallelism by module, then FSDP2 over the rest. Master weights, gradients and their sums are float32;
with `dtype: bfloat16` FSDP casts the weights that a layer computes with. With `lora` only adapters are trained, and the
others are kept in the dtype of computation. A single rank that computes in float32 has a plain model and no process
group. So has one on a CPU that multiplies in bfloat16: it casts all weights for a pass, and pads passes to a few sizes,
because oneDNN compiles a kernel for every shape. A CPU that has no instructions for it computes in float32.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.func import functional_call
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils.logging import disable_progress_bar

from rollart.config import TrainingConfig
from rollart.core.errors import RollartError
from rollart.models.adapters import file_name
from rollart.models.disk_names import DiskNames, DiskTensor
from rollart.training.context import Peers
from rollart.training.experts import ExpertLoad, WatchedGates, watch
from rollart.training.fused import TrainedRows, fuse_layers
from rollart.training.lora import adapted_class, adapter_parameters, adapters_off, reset_adapters
from rollart.training.norms import use_fast_norms
from rollart.training.packing import ATTENTION, Packed, pack
from rollart.training.ranks import Ranks, mesh_of_one
from rollart.training.recompute import recompute
from rollart.training.score import VocabularySplit, score

PASS_SIZES, MIN_PADDING = 16, 64  # of the passes whose shapes oneDNN compiles
WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
PLAIN = TrainingConfig()

disable_progress_bar()  # a service writes to a log, not to a terminal


class PolicyModel:
    """Implements `rollart.training.strategy.Strategy`. In evaluation mode even in training: dropout would make its
    probabilities differ from the engine's.

    `companions` are the other files of its folder (tokenizer, chat template), for checkpoints.
    """

    tensor_plan: ClassVar[dict[str, str] | None] = {"lm_head": "colwise"}  # beside that of transformers

    def __init__(
        self, folder: Path, ranks: Ranks | None = None, config: TrainingConfig = PLAIN, *, trained: bool = True
    ) -> None:
        """Not `trained`: no gradients, and no adapters."""
        self._ranks = ranks or Ranks.single()
        self._lora = config.lora if trained else None
        recomputed = trained and config.recompute != "none"
        self._alone = (
            self._ranks.size == 1 and self._ranks.device.type == "cpu" and self._lora is None and not recomputed
        )
        dtype = config.dtype if not self._alone or multiplies_bfloat16() else "float32"
        self._casts = self._alone and dtype == "bfloat16"
        self.model = self._load(folder, config, mixed=dtype == "bfloat16" and not self._casts)
        self.companions = {
            file.name: file.read_bytes()
            for file in folder.iterdir()
            if file.is_file() and not file.name.endswith(WEIGHT_FILES)
        }
        self._ranks.meet()
        self._disk_names = DiskNames(self.model)
        self.model.requires_grad_(trained and self._lora is None)
        if self._lora is not None:
            reset_adapters(self.model)
            for parameter in self.parameters().values():
                parameter.requires_grad_()
        self._check()
        self._prepare_passes(config, trained=trained)
        self._cast_names = self._to_cast() if self._casts else {}

    def _load(self, folder: Path, config: TrainingConfig, *, mixed: bool) -> Any:
        try:
            kind, options = self._kind(folder)
            plan, frozen = self.tensor_plan, self._lora is not None
            return _load(folder, self._ranks, config, kind, mixed=mixed, frozen=frozen, tensor_plan=plan, **options)
        except (OSError, ValueError) as error:
            raise RollartError(f"no causal language model can be loaded from {folder}: {error}") from error

    def _prepare_passes(self, config: TrainingConfig, *, trained: bool) -> None:
        """Put the forward pass of training in place of the model's own, around the layers as they are to compute."""
        if self._ranks.layout.tensor == 1:  # under tensor parallelism transformers has its own hooks in the norms
            use_fast_norms(self.model)
        offload = "activations" in config.offload and self._ranks.device.type != "cpu"
        if trained and (config.recompute != "none" or offload):
            recompute(_layers(self.model), config.recompute, offload=offload)
        self._gates = watch(
            self.model,
            context=self._ranks.context,
            balance=config.algorithm.expert_balance if trained else 0.0,
            replay=config.replay_experts and trained,
        )
        flash = self._ranks.device.type == "cuda" and config.dtype == "bfloat16"
        self.shares_prompts = self._gates is None and not flash  # experts are counted, and chosen, by sequence
        layers = _layers(self.model)
        tail: TrainedRows | None = fuse_layers(self.model, layers) if self._alone and self._gates is None else None
        last = getattr(layers[-1], "mlp", None) if self._gates is None else None
        if tail is None and last is not None:
            tail = _ScoredBlock(last)
        multiple = max(MIN_PADDING, config.pack_tokens // PASS_SIZES) if self._casts and self._gates is None else 1
        self.model.forward = MethodType(_Forward(self._ranks, self._gates, tail, self._outputs, multiple), self.model)

    def _kind(self, folder: Path) -> tuple[Any, dict[str, Any]]:
        """The class of the model, and what `from_pretrained` needs besides."""
        if self._lora is None:
            return AutoModelForCausalLM, {}
        about = AutoConfig.from_pretrained(folder, local_files_only=True)
        kind, mapping = adapted_class(AutoModelForCausalLM._model_mapping[type(about)], about, self._lora)
        return kind, {"key_mapping": mapping}

    def _check(self) -> None:
        _check_head(self.model, self._ranks.device)

    def _outputs(self, model: Any, hidden: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, ...]:
        """What the head makes of the states before the trained tokens."""
        weight, bias, split = _head(model, self._ranks.tensor)
        return score(hidden.to(weight.dtype), weight, targets, bias=bias, temperature=temperature, split=split)

    def parameters(self) -> dict[str, nn.Parameter]:
        """By name, tied ones once; with LoRA the adapters alone. They are DTensors if they are sharded."""
        return dict(self.model.named_parameters()) if self._lora is None else adapter_parameters(self.model)

    def embeddings(self) -> frozenset[str]:
        """Those of parameters() that are the embeddings of tokens or the output head."""
        tables = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        weights = [each.weight for each in tables if each is not None]
        return frozenset(name for name, p in self.parameters().items() if any(p is weight for weight in weights))

    def names(self) -> dict[str, str]:
        """Every name of a parameter in the model, tied ones included, to its name in parameters()."""
        return self._owners

    @cached_property
    def _owners(self) -> dict[str, str]:
        owners = {id(parameter): name for name, parameter in self.parameters().items()}
        state = self.model.state_dict(keep_vars=True)
        return {name: owners[id(value)] for name, value in state.items() if id(value) in owners}

    @cached_property
    def _buffer_names(self) -> frozenset[str]:
        return frozenset(self.model.state_dict()) - frozenset(self._owners)

    def buffers(self) -> dict[str, Tensor]:
        """The same on every rank; with LoRA none, as they stay those of the folder."""
        if self._lora is not None or not self._buffer_names:
            return {}
        return {name: value for name, value in self.model.state_dict().items() if name in self._buffer_names}

    def on_disk(self, name: str, shape: Sequence[int]) -> list[DiskTensor]:
        if self._lora is not None:
            return [DiskTensor(file_name(name), tuple(shape))]
        return self._disk_names.of(name, shape)

    def state_dict(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`tensors`, named as in parameters(), under every name that the model has for them, and the buffers."""
        return {name: tensors[owner] for name, owner in self.names().items()} | self.buffers()

    def logprobs(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Log-probability of every trained token, and the entropy of the distribution it was sampled from."""
        values: tuple[Tensor, Tensor] = self._cast_pass(packed) if self._casts else self.model(packed)
        if not torch.is_grad_enabled():
            _reshard(self.model)
        return values

    def _cast_pass(self, packed: Packed) -> Any:
        weights = self.parameters()
        given = {
            name: weights[owner].to(torch.bfloat16) if cast else weights[owner]
            for name, (owner, cast) in self._cast_names.items()
        }
        return functional_call(self.model, given, (packed,), tie_weights=False)

    def _to_cast(self) -> dict[str, tuple[str, bool]]:
        """By name in the model: that in parameters(), and whether a pass casts it. Not the head: logits as coarse as
        bfloat16 would be off by more than the states are."""
        head = self.model.get_output_embeddings()
        exact = {f"{name}." for name, module in self.model.named_modules() if module is head}
        return {name: (owner, not name.startswith(tuple(exact))) for name, owner in self.names().items()}

    def base(self) -> "FrozenBase | None":
        """What it was before it was trained, if that is still there: with adapters off."""
        return None if self._lora is None else FrozenBase(self)

    def expert_load(self) -> ExpertLoad | None:
        return None if self._gates is None else self._gates.load


@dataclass(frozen=True, slots=True)
class FrozenBase:
    """A policy without its adapters: no second copy of the weights."""

    policy: PolicyModel

    @torch.no_grad()
    def logprobs(self, packed: Packed) -> tuple[Tensor, Tensor]:
        with adapters_off(self.policy.model):
            return self.policy.logprobs(packed)


class _ScoredBlock(TrainedRows):
    """The feed-forward block of the last layer, only for the positions that are scored."""

    def __init__(self, block: nn.Module) -> None:
        self._whole = block.forward
        block.forward = self

    def __call__(self, states: Tensor) -> Tensor:
        if self.rows is None or 8 * len(self.rows) > 7 * states.shape[1]:  # copies would cost what is saved
            return self._whole(states)  # type: ignore[no-any-return]
        part = self._whole(states.index_select(1, self.rows))
        return torch.zeros_like(states).index_copy(1, self.rows, part)


class _Forward:
    """The forward pass that training needs, in place of the model's own: FSDP gathers weights around that."""

    def __init__(
        self,
        ranks: Ranks,
        gates: WatchedGates | None,
        tail: TrainedRows | None,
        outputs: Callable[[Any, Tensor, Tensor, Tensor | None], tuple[Tensor, ...]],
        multiple: int,
    ) -> None:
        """Passes are padded to a `multiple` of tokens."""
        self._context, self._gates, self.tail, self._outputs = ranks.context, gates, tail, outputs
        self._multiple = multiple

    def __call__(self, model: Any, packed: Packed) -> tuple[Tensor, ...]:
        context, total = self._context, packed.tokens.shape[1]
        tokens, positions, predict = packed.tokens, packed.positions, packed.predict
        targets, temperature = packed.targets, packed.temperature
        if context is not None:
            tokens, positions = context.cut(tokens), context.cut(positions)
            start, size = context.slice_of(total)
            mine = (predict >= start) & (predict < start + size)
            predict, targets = predict[mine] - start, targets[mine]
            temperature = None if temperature is None else temperature[mine]
        if padding := -total % self._multiple:
            tokens, positions = (functional.pad(each, (0, padding)) for each in (tokens, positions))
        if self._gates is not None:
            self._gates.begin(packed)
        if self.tail is not None:
            rows = torch.unique(predict)  # a teacher's likeliest tokens repeat a position
            self.tail.rows = _with_others(rows, -len(rows) % self._multiple, tokens.shape[1])
        states = model.base_model(
            input_ids=tokens, position_ids=positions, use_cache=False, packed=packed, context=context
        ).last_hidden_state[0]
        if self._gates is not None:
            self._gates.end(packed)
        values = self._outputs(model, states.index_select(0, predict), targets, temperature)
        if context is not None:
            owners = packed.predict // size
            sizes = torch.bincount(owners, minlength=context.size).tolist()
            first, *others = (context.gather(each, sizes) for each in values)
            # A slice with nothing to predict stays in the graph: its rank takes part in every exchange backwards.
            values = (first + 0 * states.sum(), *others)
            if packed.shown is not None:  # a prompt's last token comes before those of its other sequences
                order = owners.argsort(stable=True).argsort()
                values = tuple(each[order] for each in values)
        return values


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _with_others(rows: Tensor, count: int, total: int) -> Tensor:
    """`rows`, and `count` of the other rows up to `total`."""
    if not count:
        return rows
    free = torch.ones(total, dtype=torch.bool, device=rows.device)
    free[rows] = False
    return torch.cat((rows, free.nonzero()[:count, 0]))


def _head(model: Any, peers: Peers | None) -> tuple[Tensor, Tensor | None, VocabularySplit | None]:
    head = model.get_output_embeddings()
    weight, bias, split = head.weight, getattr(head, "bias", None), None
    if peers is not None:
        share = -(-weight.shape[0] // peers.size)
        split = VocabularySplit(peers.group, share * peers.rank)
        weight, bias = weight.to_local(), None if bias is None else bias.to_local()
    return weight, bias, split


def _load(
    folder: Path,
    ranks: Ranks,
    config: TrainingConfig,
    kind: Any,
    *,
    mixed: bool,
    frozen: bool,
    tensor_plan: Any,
    **options: Any,
) -> Any:
    """If `mixed`, FSDP casts to bfloat16. With `frozen` weights, which are kept in the dtype of computation."""
    layout = ranks.layout
    offloaded = "optimizer" in config.offload and ranks.device.type != "cpu"  # on CPUs it is there already
    if ranks.size > 1:
        options["distributed_config"] = DistributedConfig(
            fsdp_size=layout.shards,
            tp_size=layout.tensor,
            ep_size=layout.expert,
            tp_plan=tensor_plan if layout.tensor > 1 else None,
            fsdp_mixed_precision=mixed,
            fsdp_cpu_offload=offloaded,
        )
    dtype = torch.bfloat16 if mixed and frozen else torch.float32
    model = kind.from_pretrained(
        folder, attn_implementation=ATTENTION, dtype=dtype, local_files_only=True, **options
    ).eval()
    model.config.distributed_config = None  # ranks meet where we say so: transformers would gather and wait by it
    if ranks.size == 1:
        model.to(ranks.device)
    if layout.shards == 1 and (ranks.size > 1 or mixed or offloaded):
        # Sharded over one: it casts, offloads, and adds up the gradients of norms between tensor-parallel layers.
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        offload = CPUOffloadPolicy() if offloaded else OffloadPolicy()
        mesh = mesh_of_one(ranks.device) if ranks.size == 1 else model._device_mesh["fsdp"]
        for module in (*_layers(model), model):
            fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Token weights are shares of the whole batch, so gradients are summed; gloo has only sums anyway.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def _reshard(model: nn.Module) -> None:
    """After a forward pass without a backward pass, which would do this: FSDP keeps the head's weights gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _layers(model: Any) -> list[nn.Module]:
    kinds = model._no_split_modules
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in kinds]


@torch.no_grad()
def _check_head(model: Any, device: torch.device) -> None:
    """Some models scale or cap their logits after the head, which would silently train something else."""
    seen: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _, args, output: seen.append(output))
    with device:
        packed = pack([[0, 1, 2]], [[0, 1, 1]])
    whole = model(input_ids=packed.tokens, position_ids=packed.positions, packed=packed, use_cache=False).logits
    hook.remove()
    _reshard(model)
    if not torch.equal(whole, seen[0].to(whole.dtype)):
        raise RollartError(
            f"{type(model).__name__} changes its logits after the output head; "
            "such models cannot be trained: choose one whose logits are the head's output"
        )
