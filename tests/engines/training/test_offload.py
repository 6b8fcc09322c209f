"""A training engine sleeps, so that rollouts can use its device, and continues bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.algorithms import PolicyObjective
from asyncrl.data import DataProto
from asyncrl.errors import EngineError
from engines.training import offload
from engines.training.fsdp_engine import FSDPEngine
from engines.training.model import local_shard
from engines.training.offload import Offload, host_memory, resizable
from engines.training.packed_attention import _band

LENGTHS = [9, 4, 17, 6]
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


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


def test_no_mask_is_kept_in_its_sleep(model_folder: Callable[..., str], trajectories: Callable[..., DataProto]) -> None:
    folder = model_folder("mistral", sliding_window=4)
    engine = FSDPEngine(folder, objective=PolicyObjective(), lr=1e-2, device="cpu")
    engine.log_probs(trajectories(LENGTHS))
    assert _band.cache_info().currsize > 0
    engine.sleep()
    assert _band.cache_info().currsize == 0
    engine.close()


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


def test_memory_that_cannot_be_freed_stays():
    offload = Offload(torch.device("cpu"))
    freed, kept = torch.arange(1000.0), torch.arange(3.0)
    kept.numpy()
    offload.release([freed, kept])
    assert freed.untyped_storage().nbytes() == 0
    assert kept.tolist() == [0.0, 1.0, 2.0]
    offload.restore()
    assert torch.equal(freed, torch.arange(1000.0))
    offload.close()


@pytest.mark.parametrize("pinned", [False, pytest.param(True, marks=GPU)])
def test_host_memory_lies_side_by_side_in_few_allocations(monkeypatch: pytest.MonkeyPatch, pinned: bool):
    """Slabs of 1024 bytes: 128 + 832 + 64 of them fill the first, 320 + 256 the second; 1536 get one of their own."""
    monkeypatch.setattr(offload, "_SLAB_BYTES", 1024)
    sizes = [100, 800, 300, 40, 0, 1500, 200]
    memory = host_memory(sizes, pinned=pinned)
    assert [each.numel() for each in memory] == sizes
    for number, each in enumerate(memory):
        each.fill_(number)
    assert all(bool((each == number).all()) for number, each in enumerate(memory))
    assert [each.is_pinned() for each in memory if each.numel()] == [pinned] * 6
    assert all(each.data_ptr() % 64 == 0 for each in memory)
    slabs = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in memory}
    # The third has the next power of two for 1536, but no more than is left: 1536 + 256.
    assert sorted(slabs.values()) == [1024, 1024, 1792]
    assert host_memory([], pinned=pinned) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_that_sleeps_leaves_the_device_and_comes_back_as_it_was(
    model_folder: Callable[..., str], trajectories: Callable[..., DataProto], tmp_path: Path, dtype: Any
):
    """A snapshot lies in pinned memory of its own: it is that of the update before it, whatever is done meanwhile."""
    folder = model_folder("llama", intermediate_size=65536)  # 24 MiB a layer, and as much for each moment
    engine = FSDPEngine(folder, objective=PolicyObjective(), lr=1e-2, device="cuda", dtype=dtype)

    def state() -> list[torch.Tensor]:
        moments = (each for pair in engine._optimizer.moments().values() for each in pair.values())
        return [each.detach().cpu() for each in (*(tensor for _, tensor in engine.named_tensors()), *moments)]

    engine.sleep()  # before it has moments
    engine.wake()
    held = torch.cuda.memory_allocated()
    engine.prepare_snapshots()
    assert torch.cuda.memory_allocated() == held
    assert all(each.is_pinned() for each in engine._memory.tensors.values())
    for seed in range(2):
        engine.update(trajectories(LENGTHS, seed=seed))
        snapshot, before = engine.snapshot(), state()
        held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        engine.sleep()
        assert torch.cuda.memory_allocated() <= held[0] - 2 * 3 * (24 << 20)
        assert torch.cuda.memory_reserved() <= held[1] - 2 * 3 * (24 << 20), "another process has to be able to take it"
        engine.wake()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(state(), before, strict=True))
        engine.update(trajectories(LENGTHS, seed=9))
        assert not torch.equal(state()[0], before[0])
        saved = tmp_path / str(seed)
        saved.mkdir()
        snapshot.write(saved)
        engine.files.seal(saved)
        engine.load(saved)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(state(), before, strict=True))
    engine.close()
