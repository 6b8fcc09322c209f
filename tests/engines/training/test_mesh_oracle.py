"""Whatever the mesh, the trainer does what one rank does: random configurations, see mesh_oracle.py."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def oracle() -> Iterator[Any]:
    """The module, under a name by which processes of ranks can import it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield importlib.import_module("mesh_oracle")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_mesh_does_what_one_rank_does(oracle: Any, tmp_path: Path) -> None:
    chosen = [
        oracle.Case(seed=99, ranks=4, mesh={"pp": 2, "dp_shard": 2}, resumed={"dp_shard": 4}, tied=False, lora=True),
        oracle.Case(seed=100, ranks=2, mesh={"dp_shard": 2, "ep": 2}, resumed={"cp": 2, "ep": 2}, **MIXTURE),
        oracle.Case(seed=101, ranks=4, mesh={"dp_shard": 4, "ep": 2}, resumed={"dp_shard": 4}, experts=2, **MIXTURE),
    ]
    assert oracle.judged([*map(oracle.Case.draw, SLOW_SEEDS), *chosen], tmp_path) == {}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"cp": 2}, {"dp_shard": 2, "ep": 2}], ids=str)
def test_a_compiled_mesh_does_what_one_rank_does_without(oracle: Any, tmp_path: Path, mesh: dict[str, int]) -> None:
    options = {"compile": "aot_eager", "checkpointing": "dp_shard" in mesh}
    family = "qwen3_moe" if "ep" in mesh else "llama"
    case = oracle.Case(seed=0, ranks=2, mesh=mesh, resumed=mesh, family=family, **options)
    assert oracle.judged([case], tmp_path) == {}


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_hundreds_of_meshes_do_what_one_rank_does(oracle: Any, tmp_path: Path, capsys: Any) -> None:
    """``ASYNCRL_ORACLE`` is the range of seeds, as in ``0:300``."""
    first, last = map(int, os.environ.get("ASYNCRL_ORACLE", "0:300").split(":"))
    failures = oracle.judged(map(oracle.Case.draw, range(first, last)), tmp_path)
    with capsys.disabled():
        print(f"\noracle_configurations = {last - first}\noracle_failures = {len(failures)}")
    assert failures == {}


SLOW_SEEDS = range(6)
MIXTURE = {"family": "qwen3_moe", "tied": False, "prompt": 11}
