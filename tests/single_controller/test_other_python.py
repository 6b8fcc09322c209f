"""Workers in an environment of their own, with what is installed there and nowhere else."""

from __future__ import annotations

import site
import sys
import venv
from pathlib import Path

import pytest
import torch

from asyncrl.data import DataProto
from asyncrl.single_controller import Dispatch, Worker, register

pytest.importorskip("ray")

from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


class Engine(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self) -> tuple[str, int]:
        import only_there  # type: ignore[import-not-found, unused-ignore]

        return sys.prefix, only_there.ANSWER

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def backoff(self, batch: DataProto) -> DataProto:
        assert batch.batch is not None
        return DataProto.from_dict(tensors={"x": batch.batch["x"] * 2})


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """An environment with one module more than this one; its other packages are those of this one."""
    venv.create(tmp_path / "other", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "other" / "lib").glob("python*/site-packages")
    (packages / "only_there.py").write_text("ANSWER = 42\n")
    (packages / "shared.pth").write_text("\n".join([str(Path(__file__).parents[2]), *site.getsitepackages()]) + "\n")
    return tmp_path / "other"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_group_runs_in_another_environment(other: Path) -> None:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    options = {"runtime_env": {"py_executable": str(other / "bin" / "python")}}
    with RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(Engine).options(**options)) as group:
        assert group.where().result(60) == [(str(other), 42)] * 2
        batch = group.backoff(DataProto.from_dict(tensors={"x": torch.arange(4)})).result(60).batch
        assert batch is not None
        assert batch["x"].tolist() == [0, 2, 4, 6]
    with pytest.raises(ModuleNotFoundError):
        __import__("only_there")
