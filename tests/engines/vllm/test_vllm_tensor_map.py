"""Where tensors lie, and the extension that reads them there: checked in our own Python, without vLLM."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollart.core.errors import RollartError
from rollart.engines.vllm.command import EXTENSION, INSIDE
from rollart.engines.vllm.tensor_map import TensorMap, in_folder, in_shards
from rollart.weights.manifest import Manifest
from rollart.weights.publish import Publisher, TensorShard
from rollart.weights.store import Store


def extension() -> Any:
    """As vLLM finds it: by the name of a class in a module of that folder."""
    module, _, name = EXTENSION.partition(".")
    spec = importlib.util.spec_from_file_location(module, INSIDE / f"{module}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return getattr(loaded, name)


class Runner:
    """Stands where vLLM's own would, to see what it is given."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.model = torch.nn.Linear(1, 1)
        self.model.quant_method = SimpleNamespace(moe_kernel="packs the weights that it was made with")

    def reload_weights(self, weights_iterator: Any) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in weights_iterator}


def swapped(where: TensorMap) -> dict[str, torch.Tensor]:
    worker = extension()()
    worker.model_runner = Runner()
    arguments = json.loads(json.dumps(where.arguments()))  # they travel as JSON
    worker.rollart_prepare(**arguments)
    worker.rollart_swap()
    read: dict[str, torch.Tensor] = worker.model_runner.tensors
    return read


def test_a_model_folder_is_read_from_its_safetensors_files(tmp_path: Path) -> None:
    first = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16()}
    second = {"c": torch.arange(4)}
    save_file(first, tmp_path / "model-1.safetensors")
    save_file(second, tmp_path / "model-2.safetensors")
    read = swapped(in_folder(tmp_path))
    assert set(read) == {"a", "b", "c"}
    for name, tensor in (first | second).items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def test_a_tied_embedding_is_the_output_layer_too(tmp_path: Path) -> None:
    embedding = torch.randn(3, 5)
    save_file({"model.embed_tokens.weight": embedding}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    assert torch.equal(swapped(in_folder(tmp_path))["lm_head.weight"], embedding)
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    assert "lm_head.weight" not in swapped(in_folder(tmp_path))


def test_a_folder_without_weights_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(RollartError, match=f"{tmp_path} has no weights"):
        in_folder(tmp_path)


def test_a_version_of_the_store_is_put_together_from_the_shards_of_all_ranks(tmp_path: Path) -> None:
    whole, other = torch.randn(6, 4), torch.randn(3)
    store, files = Store(tmp_path), []
    for shard, rows in enumerate((whole[:4], whole[4:])):
        shares = [TensorShard("split", (6, 4), rows.contiguous(), start=shard * 16)]
        if shard == 0:
            shares += [TensorShard("own", (3,), other), TensorShard("tied", (3,), other)]
        manifest: Manifest = Publisher(store, shard=shard, shards=2).publish(7, "ab", shares)
        files.append((store.path(7, "ab", shard, "data"), manifest))
    read = swapped(in_shards(files))
    assert torch.equal(read["split"], whole)
    assert torch.equal(read["own"], other) and torch.equal(read["tied"], other)


def test_a_worker_that_cannot_see_the_weights_says_so_before_anything_is_swapped(tmp_path: Path) -> None:
    worker = extension()()
    with pytest.raises(FileNotFoundError):
        worker.rollart_prepare(files=[str(tmp_path / "nowhere")], tensors=[])
    with pytest.raises(RuntimeError, match="before rollart_prepare"):
        worker.rollart_swap()


def test_new_weights_of_experts_are_packed_again() -> None:
    """On CPUs: vLLM packs them when it makes their kernel."""
    worker = extension()()
    worker.model_runner = Runner()
    worker.rollart_prepare([], [])
    worker.rollart_swap()
    assert worker.model_runner.model.quant_method.moe_kernel is None
