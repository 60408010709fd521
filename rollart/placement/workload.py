"""The workload of a run: turns of its tasks and passes of its trainer, priced by the roofline; the memory it needs."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollart.config import AFFINITIES, ParallelConfig, PoolConfig, RunFile, TaskConfig
from rollart.config.algorithm import CRITIC_ADVANTAGES
from rollart.config.training import MODELS
from rollart.core import run_folder
from rollart.core.errors import RollartError
from rollart.core.event_log import read_events
from rollart.core.events import TrajectoryEnded, TurnDone
from rollart.hardware import layout_choice
from rollart.hardware.devices import DeviceClass
from rollart.hardware.layout import Layout, misfits
from rollart.hardware.roofline import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY, ModelShape, Roofline, Work, decode, prefill
from rollart.hardware.training_memory import USABLE, Decoder, TrainingSetup, training_memory
from rollart.models import tiny

MEASURED = "measured"
_LIKELY = 0.5  # fraction of the limits in the run file that is assumed before anything is measured
_TRAINED = "weights, gradients, Adam's moments"
TRAINING_PARTS = ("parameters", "gradients", "optimizer", "reference", "critic", "activations", "working")


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """An average turn: `prompt` tokens added to the `context`, and `decode` tokens of the answer."""

    prompt: float
    decode: float
    context: float = 0.0
    source: str = MEASURED

    @property
    def kind(self) -> str:
        """By tokens; a decoded token costs more than a prompt token."""
        if self.decode >= self.prompt:
            return "decode-heavy"
        return "prefill-heavy" if self.prompt >= 2 * self.decode else "mixed"

    @property
    def ratio(self) -> str:
        """Prompt to decoded tokens."""
        return f"{_rounded(self.prompt)} : {_rounded(self.decode)}"

    def __str__(self) -> str:
        return f"{_rounded(self.prompt)} prompt : {_rounded(self.decode)} decoded"


def _rounded(tokens: float) -> str:
    return f"{tokens:.3g}" if tokens < 100 else f"{tokens:.0f}"


def model_config(run: RunFile) -> dict[str, Any]:
    """The values of the model's `config.json`."""
    if run.model.tiny:
        return {"model_type": run.model.tiny.architecture, **tiny.sizes(run.model.tiny)}
    if run.model.path is None:
        return dict(run.model.config or MODELS[str(run.model.name)])
    config: dict[str, Any] = json.loads((run.model.path / "config.json").read_text())
    return config


def model_shape(run: RunFile) -> ModelShape:
    return ModelShape.of(model_config(run), 4 if run.engine.dtype == "float32" else 2)


def shape_of(task: TaskConfig, measured: Mapping[str, WorkloadShape] | None = None) -> WorkloadShape:
    """As measured; else half of the limits, and of that only the part that a declared affinity names."""
    if measured and task.name in measured:
        return measured[task.name]
    turn = task.max_context / task.max_turns
    answer = min(task.sampling.max_tokens, turn)
    prompt, context = max(turn - answer, turn / 8), turn * (task.max_turns - 1) / 2
    kept = {"prefill": (1, 0), "decode": (0, 1)}.get(str(task.affinity), (1, 1))
    source = "estimated" if all(kept) else "declared"
    return WorkloadShape(_LIKELY * prompt * kept[0], _LIKELY * answer * kept[1], _LIKELY * context, source)


def measured_shapes(run_dir: Path) -> dict[str, WorkloadShape]:
    """The mean turn of each task in the event log of a run. Raises RollartError if the folder holds no run."""
    sums: dict[str, Counter[str]] = {}
    contexts: dict[str, int] = {}  # tokens so far of each unfinished trajectory
    for event in read_events(run_folder.events_of(run_dir), TurnDone, TrajectoryEnded):
        if isinstance(event, TurnDone):
            before = contexts.get(event.trajectory, 0) if event.turn else 0
            total = sums.setdefault(event.task, Counter())
            total.update(turns=1, prompt=event.prompt - before, decode=event.tokens, context=before)
            contexts[event.trajectory] = event.prompt + event.tokens
        elif isinstance(event, TrajectoryEnded):
            contexts.pop(event.trajectory, None)
    means = {task: {key: value / total["turns"] for key, value in total.items()} for task, total in sums.items()}
    return {task: WorkloadShape(mean["prompt"], mean["decode"], mean["context"]) for task, mean in means.items()}


def turn_seconds(roofline: Roofline, shape: WorkloadShape, batch: int, chunk: int) -> float:
    """Engine time of one turn while `batch` sequences run: a pass decodes all of them, or prefills as many as fill a
    `chunk`, and they share the reading of the weights."""
    new, mean = round(shape.prompt), shape.context + shape.prompt + shape.decode / 2
    shared = max(1, min(batch, chunk // max(new, 1)))
    work = prefill(new, round(shape.context))
    prompt = roofline.seconds(Work(shared * work.tokens, shared * work.attended, shared * work.kv_tokens)) / shared
    return prompt + shape.decode * roofline.seconds(decode(batch, round(batch * mean))) / batch


def training_seconds(device: DeviceClass, model: ModelShape, ranks: int, tokens: int) -> tuple[float, float]:
    """Of one pass over `tokens` on each rank: computing, and at the same time moving float32 weights and gradients. The
    network between nodes is ignored: it is the same for every class."""
    compute = 3 * tokens * model.token_flops / (device.tflops * 1e12 * COMPUTE_EFFICIENCY)
    moved = 3 * 4 * model.parameters * (ranks - 1) / ranks
    return compute, moved / (device.link * 1e9 * MEMORY_EFFICIENCY)


def may_use(task: TaskConfig, pool: str) -> bool:
    """A pin names pools; any other affinity allows all."""
    if isinstance(task.affinity, str):
        return task.affinity == pool or task.affinity in AFFINITIES
    return pool in task.affinity


def shares(tasks: Iterable[TaskConfig]) -> list[tuple[TaskConfig, float]]:
    """The share of each task in all turns, at its limit of turns."""
    turns = [(task, task.weight * task.max_turns) for task in tasks]
    return [(task, number / sum(each for _, each in turns)) for task, number in turns]


def in_flight(run: RunFile) -> int:
    """The maximum number of trajectories in the pipeline."""
    schedule = run.rollout.schedule()
    batches = 1 if schedule.one_batch else schedule.alpha + 1
    groups = math.ceil(batches * schedule.elastic * run.training.batch_groups) + schedule.extra_groups * len(run.tasks)
    keep = min((task.filter.keep for task in run.tasks if task.filter), default=1.0)
    size = max(task.group_size or run.training.group_size for task in run.tasks)
    return math.ceil(groups / keep) * (size + schedule.extra_members)


def expected_batch(run: RunFile) -> int:
    """Sequences that decode together on an engine, if the maximum in flight is spread evenly."""
    engines = sum(pool.workers for pool in run.pools_of("generate").values())
    return max(1, min(run.engine.max_batch, in_flight(run) // engines))


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of each device of a pool, by what they are for; of a trainer also its layout, and why it has that one."""

    parts: Mapping[str, float]
    what: str
    layout: Layout | None = None
    why: str = ""
    host: float = 0.0

    @property
    def gigabytes(self) -> float:
        return sum(self.parts.values()) / 1e9

    def fits(self, device: DeviceClass) -> bool:
        """Workers on CPUs always fit: they share the memory of their node."""
        return device.name == "cpu" or self.gigabytes <= USABLE * device.memory

    def shortfall(self, device: DeviceClass) -> str:
        return (
            f"{self.what} take {self.gigabytes:.3g} GB on each, but one {device.name} has {device.memory:g} GB, "
            f"of which {USABLE * device.memory:.3g} can be used"
        )


def need_of(run: RunFile, pool: PoolConfig, model: ModelShape, device: DeviceClass) -> MemoryNeed:
    """Of each device of the pool, if they are of this class."""
    match pool.role:
        case "train":
            return _training_need(run, pool, device)
        case "generate":
            shared = pool.tensor_parallel
            parts = {"parameters": model.parameters * model.number_bytes / shared}
            parts["KV"] = run.engine.kv_megabytes * 1e6 / shared
            over = f", over {shared} devices," if shared > 1 else ""
            return MemoryNeed(parts, f"weights in {run.engine.dtype} and {run.engine.kv_megabytes} MB of KV{over}")
    return MemoryNeed({}, "environments")


def longest_context(run: RunFile) -> int:
    return max(task.max_context for task in run.tasks)


def _most_tokens(run: RunFile) -> int:
    """That an update can learn from at once. Agents rewrite their history, and then an episode is several sequences."""
    if any(task.agent for task in run.tasks):
        return run.training.pack_tokens
    groups = math.ceil(run.rollout.schedule().elastic * run.training.batch_groups / run.training.updates)
    sequences = groups * max(task.group_size or run.training.group_size for task in run.tasks)
    return max(sequences, run.model.warmup.batch if run.model.warmup else 0) * longest_context(run)


def setup_of(run: RunFile) -> TrainingSetup:
    """All but the layout."""
    training, lora = run.training, run.training.lora
    targets = None if lora is None or lora.targets == "all" else lora.targets
    return TrainingSetup(
        dtype=training.dtype,
        recompute=training.recompute,
        offload=training.offload,
        optimizer=training.optimizer,
        pack_tokens=min(training.pack_tokens, _most_tokens(run)),
        longest=longest_context(run),
        reference=any(each.kl > 0 for each in run.algorithms()),
        critic=any(each.advantage in CRITIC_ADVANTAGES for each in run.algorithms()),
        adapters=Decoder.of(model_config(run)).adapters(lora.rank, targets) if lora else 0,
        flash=training.dtype == "bfloat16",
    )


def training_setup(run: RunFile, device: DeviceClass, ranks: int) -> TrainingSetup:
    """With the layout on that many devices of a class."""
    return replace(setup_of(run), layout=_layout(run, device, ranks)[0])


def training_changes(run: RunFile, device: DeviceClass, ranks: int) -> dict[str, Any] | None:
    """Keys of `training` to change so that it fits on that many devices of a class: none if it does as configured; None
    if nothing helps."""
    if device.name == "cpu":
        return {}
    model, setup, room = model_config(run), setup_of(run), USABLE * device.memory * 1e9
    parallel = run.training.parallel
    with suppress(RollartError):
        layout = _layout(run, device, ranks)[0]
        fits = training_memory(model, replace(setup, layout=layout)).total <= room
        if fits and not any(misfits(layout, model)):
            return {}
    changes, found = layout_choice.leaner(model, setup, ranks, room)
    if found is None:
        return None
    return changes | ({} if parallel.auto else {"parallel": ParallelConfig(auto=True)})


def _layout(run: RunFile, device: DeviceClass, ranks: int) -> tuple[Layout, str]:
    """As configured. With `parallel: auto` it is chosen for the device, with the reason; if none fits, the layout is
    data parallelism."""
    if run.training.parallel.auto:
        room = math.inf if device.name == "cpu" else USABLE * device.memory * 1e9
        if chosen := layout_choice.choose(model_config(run), setup_of(run), ranks, room):
            return chosen.layout, "memory is the node's" if room == math.inf else chosen.why
    return run.training.parallel.layout(ranks), ""


def _training_need(run: RunFile, pool: PoolConfig, device: DeviceClass) -> MemoryNeed:
    ranks = pool.count
    layout, why = _layout(run, device, ranks)
    setup = setup_of(run)
    memory = training_memory(model_config(run), replace(setup, layout=layout))
    parts = {name: getattr(memory, name) for name in TRAINING_PARTS}
    over = f", over {ranks} ranks ({layout})," if ranks > 1 else ""
    trained = "adapters, their gradients and moments, frozen weights" if setup.adapters else _TRAINED
    what = f"{trained} and activations{over}"
    return MemoryNeed(parts, what, layout, why, memory.host)


def remedy(run: RunFile, pool: PoolConfig, device: DeviceClass) -> str:
    """What to change so that a trainer fits on this class."""
    room = USABLE * device.memory * 1e9
    return layout_choice.proposal(model_config(run), setup_of(run), pool.count, room)
