"""A training engine sleeps, so that rollouts can use its device, and continues bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.algorithms import PolicyObjective
from asyncrl.data import DataProto
from asyncrl.errors import EngineError
from engines.training.fsdp_engine import FSDPEngine
from engines.training.model import local_shard
from engines.training.offload import Offload, resizable

LENGTHS = [9, 4, 17, 6]


@pytest.fixture(params=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest, model_folder: Callable[..., str]) -> Iterator[tuple[FSDPEngine, FSDPEngine]]:
    """Two equal engines: of plain tensors in float32, of FSDP's in bfloat16."""
    made = [
        FSDPEngine(model_folder("llama"), objective=PolicyObjective(), lr=1e-2, device="cpu", dtype=request.param)
        for _ in range(2)
    ]
    yield made[0], made[1]
    for each in made:
        each.close()


def held_bytes(engine: FSDPEngine) -> int:
    tensors = [local_shard(parameter) for _, parameter in engine._model.parameters_by_name()]
    tensors += [each for state in engine._optimizer.moments().values() for each in state.values()]
    return sum(each.untyped_storage().nbytes() for each in tensors)


def published(engine: FSDPEngine) -> dict[str, bytes]:
    """The weights as a transport reads them: through numpy, which keeps memory from being resized."""
    return {name: tensor.detach().contiguous().numpy().tobytes() for name, tensor in engine.named_tensors()}


def test_it_continues_bit_for_bit(
    pair: tuple[FSDPEngine, FSDPEngine], trajectories: Callable[..., DataProto], tmp_path: Path
):
    sleeping, awake = pair
    sleeping.sleep()
    assert held_bytes(sleeping) == 0
    sleeping.wake()
    for step in range(3):
        batch = trajectories(LENGTHS, seed=step)
        assert sleeping.update(batch) == awake.update(batch)
        assert published(sleeping) == published(awake)
        if step == 1:
            sleeping.save(tmp_path / "checkpoint")
        whole = held_bytes(sleeping)
        sleeping.sleep()
        sleeping.sleep()
        assert held_bytes(sleeping) == 0
        with pytest.raises(EngineError, match=r"asleep: call wake\(\) first"):
            sleeping.update(batch)
        sleeping.wake()
        sleeping.wake()
        assert held_bytes(sleeping) == whole


def test_nothing_is_freed_where_the_file_cannot_be_written():
    offload = Offload(torch.device("cpu"))
    tensors = [resizable(torch.arange(1000.0)), resizable(torch.arange(5.0))]
    offload.release(tensors)
    offload.restore()
    assert offload._folder is not None
    (offload._folder.path / "memory").unlink()
    (offload._folder.path / "memory").mkdir()  # in the file's place
    with pytest.raises(OSError, match="memory"):
        offload.release(tensors)
    assert torch.equal(tensors[0], torch.arange(1000.0))


def test_a_file_that_was_cut_off_is_named():
    offload = Offload(torch.device("cpu"))
    offload.release([torch.arange(1000.0)])
    assert offload._folder is not None
    with (offload._folder.path / "memory").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(EngineError, match="cannot be read again: it ends 3900 bytes early"):
        offload.restore()
    offload.close()


def test_memory_that_numpy_has_seen_is_copied_before_it_is_freed():
    tensor = torch.arange(3.0)
    assert resizable(tensor) is tensor
    tensor.numpy()
    assert resizable(tensor) is not tensor
