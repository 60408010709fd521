import subprocess
import sys
import threading
from pathlib import Path

import pytest
from published import BUCKET, DEADLINE_S, Origin, same, tensors

from rollart.core.types import Publication
from rollart.weights.loaded_version import CorruptWeights
from rollart.weights.publish import publish
from rollart.weights.reader import WeightReader
from rollart.weights.store import MissingVersion


def flip(root: Path, at: int) -> None:
    (data,) = root.glob("*.data")
    with open(data, "rb+") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_a_byte_changed_in_shared_memory_is_noticed_and_nothing_is_held(tmp_path: Path) -> None:
    publication = publish(tmp_path, 1, tensors(1), bucket_bytes=BUCKET)
    weights = WeightReader(tmp_path)
    flip(tmp_path, 3 * BUCKET + 17)
    with pytest.raises(CorruptWeights, match="bucket 3 of shard 0 of version 1 has a wrong checksum"):
        weights.fetch(publication)
    flip(tmp_path, 3 * BUCKET + 17)
    held = weights.fetch(publication)
    assert same(held.tensors, tensors(1))
    held.release()
    weights.close()
    assert not list(tmp_path.glob("*.data"))  # nobody holds anything


def test_a_stream_gives_no_tensor_of_a_damaged_bucket(tmp_path: Path) -> None:
    publication = publish(tmp_path, 1, tensors(1), bucket_bytes=BUCKET)
    flip(tmp_path, 7 * BUCKET)
    names = []
    with pytest.raises(CorruptWeights, match="bucket 7"):
        names.extend(name for name, _ in WeightReader(tmp_path).stream(publication))
    assert names == ["embed", "head", "odd", "count"]


def test_a_version_that_nobody_has_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(MissingVersion, match=r"version 7 \(ff\) is not in"):
        WeightReader(tmp_path).fetch(Publication(7, "ff", ((),)))


def test_a_version_published_again_is_another_one(tmp_path: Path) -> None:
    weights = WeightReader(tmp_path)
    publications = [publish(tmp_path, 1, tensors(seed)) for seed in (1, 2)]
    for seed, publication in enumerate(publications, 1):
        held = weights.fetch(publication)
        assert same(held.tensors, tensors(seed))
        held.release()


def test_two_readers_of_one_host_bring_a_version_there_once(tmp_path: Path) -> None:
    origin, values = Origin(tmp_path / "origin"), tensors(1, rows=20_000)
    publication = origin.publish(1, values)
    hosts, helds = [WeightReader(tmp_path / "far") for _ in range(3)], []
    threads = [threading.Thread(target=lambda host=host: helds.append(host.fetch(publication))) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(helds) == 3 and all(same(held.tensors, values) for held in helds)
    assert origin.server.served == helds[0].bytes
    for held in helds:
        held.release()
    for host in hosts:
        host.close()
    origin.server.close()


@pytest.mark.slow
def test_the_reader_needs_little_of_what_rollart_needs() -> None:
    """It runs inside other programs, whose environments are their own."""
    script = "import sys, rollart.weights.reader; print(*sys.modules)"
    reported = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    heavy = {"pydantic", "aiohttp", "starlette", "uvicorn", "transformers", "ray", "safetensors", "rich"}
    assert not heavy & set(reported.stdout.split())
