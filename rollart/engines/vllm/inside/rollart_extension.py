"""Our code in vLLM's workers: new weights or adapters, read straight from shared memory.

Loaded by vLLM's own Python, which has nothing else of ours: so only the standard library and torch. Its folder holds
only what that Python needs, because it is put on its path.

Invariants: `rollart_prepare` changes nothing that generation uses, and fails if a file cannot be read, so a worker that
cannot see the weights keeps the old ones; `rollart_swap` is only called while generation is paused. The files stay open
in between, and their writer keeps them unchanged until the swap has ended.
"""

import math
import mmap
from collections.abc import Iterator
from typing import Any

import torch

ADAPTER_ID = 1  # the server has one adapter, under which all requests run


class Workers:
    """vLLM makes it a base class of its workers."""

    model_runner: Any
    _rollart_prepared: "tuple[list[mmap.mmap], list[dict[str, Any]], Any] | None" = None

    def rollart_prepare(
        self, files: list[str], tensors: list[dict[str, Any]], lora: "dict[str, Any] | None" = None
    ) -> None:
        """`tensors` have a `name`, a `dtype`, a `shape` and `pieces`: [file, byte in it, first element, elements]. With
        `lora`, its rank and alpha, they are those of the adapter."""
        maps = [_mapped(path) for path in files]
        adapter = None if lora is None else self._rollart_adapter(dict(_read(maps, tensors)), lora)
        self._rollart_prepared = maps, tensors, adapter

    def rollart_swap(self) -> None:
        """Each worker takes its part of every tensor."""
        if self._rollart_prepared is None:
            raise RuntimeError("rollart_swap was called before rollart_prepare")
        maps, tensors, adapter = self._rollart_prepared
        self._rollart_prepared = None
        if adapter is not None:
            # What vLLM does for a request with `load_inplace`, without that flag: it would load it again at every step.
            adapters = self.model_runner.lora_manager._adapter_manager
            adapters.remove_adapter(ADAPTER_ID)
            adapters.add_adapter(adapter)
            adapters.activate_adapter(ADAPTER_ID)
            return
        _forget_kernels(self.model_runner.model)
        self.model_runner.reload_weights(weights_iterator=_read(maps, tensors))

    def _rollart_adapter(self, tensors: dict[str, torch.Tensor], lora: dict[str, Any]) -> Any:
        """As vLLM makes it of a folder. Copies: it keeps them longer than the files are ours."""
        from vllm.lora.peft_helper import PEFTHelper  # type: ignore[import-not-found]

        manager = self.model_runner.lora_manager
        model = manager._adapter_manager.model
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        settings = {"r": lora["rank"], "lora_alpha": lora["alpha"], "target_modules": "all-linear"}
        return manager._lora_model_cls.from_lora_tensors(
            ADAPTER_ID,
            {name: tensor.clone() for name, tensor in tensors.items()},
            PEFTHelper.from_dict(settings),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
            skip_prefixes=getattr(model, "lora_skip_prefixes", None),
        )


def _forget_kernels(model: torch.nn.Module) -> None:
    """On CPUs the weights of experts are padded and packed for a kernel when that is made, which vLLM 0.32 does not do
    again for new weights: they would be refused, or used unpacked. Without its kernel a layer makes it again."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        weight = next(module.parameters(), None)
        if getattr(method, "moe_kernel", None) is not None and weight is not None and weight.device.type == "cpu":
            method.moe_kernel = None


def _mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        # A private mapping, which torch takes for writable; nothing is written, so no page is copied.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _read(maps: list[mmap.mmap], tensors: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the files; only a tensor in several pieces is copied."""
    for tensor in tensors:
        dtype, shape, pieces = getattr(torch, tensor["dtype"]), tensor["shape"], tensor["pieces"]
        parts = [torch.frombuffer(maps[file], dtype=dtype, count=n, offset=at) for file, at, _, n in pieces if n]
        if len(parts) == 1:
            yield tensor["name"], parts[0].reshape(shape)
            continue
        whole = torch.empty(math.prod(shape), dtype=dtype)
        for part, (_, _, start, n) in zip(parts, (piece for piece in pieces if piece[3]), strict=True):
            whole[start : start + n] = part
        yield tensor["name"], whole.reshape(shape)
