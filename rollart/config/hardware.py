"""`devices`, `pools`, `engine`, `vllm` and `routing`: what runs where."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from rollart.config.base import Conflict, Positive, Seconds, Section, TorchDevice
from rollart.hardware.devices import CATALOGUE, DeviceClass

POOL_NAME = r"^[A-Za-z][\w-]*$"
AFFINITIES = ("auto", "prefill", "decode")
DEFAULT_ENGINE = "torch"
VLLM_PYTHON = "ROLLART_VLLM_PYTHON"  # of the environment
MODEL_ROLES = ("teacher", "judge")  # whose pools have a model of their own
ENGINE_ROLES = ("generate", "judge")
DEFAULT_POOLS = {"train": "trainer", "generate": "engine", "environment": "environments"}


class EngineConfig(Section):
    """The inference engines."""

    count: Positive = Field(1, description="engines of a run without pools of role generate")
    max_batch: Positive = Field(64, description="sequences decoded together")
    prefill_chunk: Positive = Field(512, description="prompt tokens per step, in addition to decoding")
    kv_megabytes: Positive = Field(512, description="KV cache of running requests and cached prefixes, in MB")
    on_swap: Literal["recompute", "keep", "drain"] = Field(
        "recompute",
        description="recompute the KV of running requests with the new weights, keep the old KV, or finish them first",
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="weights and KV of the engine")
    device: TorchDevice = "auto"
    threads: Positive | None = Field(
        None, description="CPU threads of each engine; default: its share of this machine's cores, 1 for tiny models"
    )
    deadline: Seconds = Field(120.0, description="seconds for one request")
    start_deadline: Seconds = Field(
        300.0, description="seconds until an engine must have started, in addition to reading the model's files"
    )

    @property
    def thread_count(self) -> int:
        return self.threads or 1


class VllmConfig(Section):
    """How vLLM engines are started (pools with `engine: vllm`)."""

    python: Path | None = Field(
        None, description=f"a Python with vLLM; default: ${VLLM_PYTHON}, else the environment of `make vllm`"
    )
    container: str | None = Field(
        None,
        description="instead of `python`, a command that runs Python in a container; {mounts} and {environment} become "
        "--volume and --env options",
    )
    args: list[str] = Field(default_factory=list, description="additional arguments of the server")
    start_deadline: Seconds = Field(600.0, description="seconds until a server must answer")

    def interpreter(self) -> Path:
        return Path(self.python or os.environ.get(VLLM_PYTHON) or Path(".venv-vllm", "bin", "python")).absolute()

    @model_validator(mode="after")
    def _one_way(self) -> "VllmConfig":
        if self.python and self.container:
            raise Conflict("give either `python` or `container`, not both", "container")
        return self


class DeviceConfig(Section):
    """A device class of your own, or other numbers for one of the catalogue."""

    tflops: float | None = Field(None, gt=0, description="dense bfloat16 TFLOP/s")
    bandwidth: float | None = Field(None, gt=0, description="memory bandwidth, GB/s")
    memory: float | None = Field(None, gt=0, description="memory, GB")
    link: float | None = Field(
        None, gt=0, description="link to other devices of the node, GB/s; 10 if not in the catalogue"
    )
    network: float | None = Field(None, gt=0, description="network of the node, GB/s; 1 if not in the catalogue")
    price: float | None = Field(None, gt=0, description="price relative to an H20; 1 if not in the catalogue")

    def as_class(self, name: str) -> DeviceClass:
        numbers = {key: value for key, value in self.model_dump().items() if value is not None}
        if name in CATALOGUE:
            known = CATALOGUE[name]
            return replace(known, **numbers, source=f"the run file ({', '.join(numbers)}); {known.source}")
        return DeviceClass(**{"link": 10.0, "network": 1.0, "price": 1.0} | numbers, name=name, source="the run file")


class PoolConfig(Section):
    """Workers of one role on one device class."""

    role: Literal["train", "generate", "environment", "teacher", "judge"] = Field(description="what its workers do")
    device: str | list[str] = Field("auto", description="a device class, several in order of preference, or auto")
    count: Positive = Field(1, description="train: ranks; generate: engines; environment: environment hosts")
    engine: str = Field(DEFAULT_ENGINE, description="generate, judge: torch, the embedded engine, or vllm, its servers")
    tensor_parallel: Positive = Field(1, description="vllm: devices of one node per engine")
    model: str | None = Field(
        None, description="teacher, judge: a model folder; with `urls`, the name of the model that is served there"
    )
    urls: list[str] = Field(
        default_factory=list,
        description="generate, environment: URLs of engines or hosts that someone else runs; teacher: of vLLM's API, "
        "judge: of an OpenAI-compatible one, up to /v1",
    )
    idle: Seconds = Field(120.0, description="judge: seconds without a request after which its engines end")
    emulate: float | None = Field(
        None, gt=1, description="generate, without the device: a CPU engine paced like it, this many times slower"
    )

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device,) if isinstance(self.device, str) else tuple(self.device)

    @property
    def auto(self) -> bool:
        return self.devices == ("auto",)

    @property
    def workers(self) -> int:
        return len(self.urls) or self.count

    @property
    def takes(self) -> int:
        """Devices for all its workers."""
        return self.count * self.tensor_parallel

    @model_validator(mode="after")
    def _fits_its_role(self) -> "PoolConfig":
        if self.engine != DEFAULT_ENGINE and self.role not in ENGINE_ROLES:
            raise Conflict(f"`engine` is for pools of role generate or judge, not {self.role}", "engine")
        if self.urls and self.role == "train":
            raise Conflict("`urls` is for pools of role generate or environment, not train", "urls")
        if self.model is not None and self.role not in MODEL_ROLES:
            raise Conflict(f"`model` is for pools of role teacher or judge, not {self.role}", "model")
        if self.model is None and self.role in MODEL_ROLES:
            raise Conflict(f"a {self.role} needs `model`, a model folder or the name of one at its urls", "role")
        if self.idle != type(self).model_fields["idle"].default and self.role != "judge":
            raise Conflict(f"`idle` is for pools of role judge, not {self.role}", "idle")
        if self.role == "judge" and len(self.urls) > 1:
            raise Conflict("a judge has one URL: put a load balancer before several servers", "urls")
        if self.emulate and self.role != "generate":
            raise Conflict(f"`emulate` is for pools of role generate, not {self.role}", "emulate")
        if self.urls and self.emulate:
            raise Conflict("engines that someone else runs cannot be emulated here", "emulate")
        if self.urls and self.count not in (1, len(self.urls)):
            raise Conflict(f"count is {self.count}, but there are {len(self.urls)} urls; leave count out", "count")
        if self.emulate and len(self.devices) != 1:
            raise Conflict("an emulated device is always there; name one class, without fallbacks", "device")
        if self.auto and (self.emulate or self.urls) and self.role not in MODEL_ROLES:
            what = "to emulate" if self.emulate else "of the engines that someone else runs"
            raise Conflict(f"name the device class {what}", "device")
        if not self.devices or len(set(self.devices)) < len(self.devices) or (not self.auto and "auto" in self.devices):
            raise Conflict("name a device class, different ones in order of preference, or auto alone", "device")
        return self


class RoutingConfig(Section):
    """Which engine serves a request."""

    policy: Literal["measured", "declared", "round_robin"] = Field(
        "measured", description="by the measured shape of the tasks, by their `affinity` alone, or round robin"
    )
    disaggregate: Literal["never", "auto", "always"] | list[str] = Field(
        "never", description="prefill on one engine and decode on another; or the names of a prefill and a decode pool"
    )
