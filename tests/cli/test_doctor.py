"""``asyncrl doctor``: what it checks and what it reports."""

import importlib.metadata
import json
import sys
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from asyncrl.cli import doctor as module
from asyncrl.cli.doctor import Check, doctor_command, examine


@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("torch>=2.7", ""),
        ("vllm>=0.30; extra == 'vllm'", "vllm"),
        ('uvloop>=0.21; sys_platform != "nowhere"', ""),
        ("asyncrl[envs]; extra == 'dev'", "dev"),
        (f"x; sys_platform != '{sys.platform}'", None),
    ],
)
def test_the_extra_that_brings_a_requirement(line, extra):
    assert module._extra_of(Requirement(line)) == extra


@pytest.fixture
def healthy(monkeypatch):
    monkeypatch.setattr(module, "examine", lambda: [Check("python", "ok", "3.11"), Check("wandb", "warning", "none")])


def test_a_machine_that_can_train(healthy, capsys):
    assert doctor_command(SimpleNamespace(json=False), ()) == 0
    assert "asyncrl train can run here." in capsys.readouterr().out
    assert doctor_command(SimpleNamespace(json=True), ()) == 0
    assert json.loads(capsys.readouterr().out) == {
        "ok": True,
        "checks": [
            {"name": "python", "status": "ok", "found": "3.11", "remedy": ""},
            {"name": "wandb", "status": "warning", "found": "none", "remedy": ""},
        ],
    }


def test_a_missing_dependency_fails_with_the_command_that_brings_it(monkeypatch, capsys):
    def version(name):
        if name == "xxhash":
            raise importlib.metadata.PackageNotFoundError(name)
        return {"rich": "0.0.1", "torch": "2.13.0+cpu"}.get(name, "1000")

    monkeypatch.setattr(module, "version", version)
    monkeypatch.setattr(module, "_torch", list)
    monkeypatch.setattr(module, "_ray", list)
    monkeypatch.setattr(module, "_parts", list)
    monkeypatch.setattr(module, "_sandbox", lambda: Check("code sandbox", "ok", "all"))
    assert doctor_command(SimpleNamespace(json=False), ()) == 1
    out = capsys.readouterr().out
    assert "FAIL  xxhash" in out
    assert "-m pip install 'xxhash>=" in out
    assert "FAIL  rich" in out
    assert "ok    torch" in out  # a local build counts as its release
    assert "cannot run here" in out


def test_a_part_that_does_not_import_is_named_with_its_cause(monkeypatch):
    monkeypatch.setattr(module, "part_names", lambda group: ("fsdp",) if "training" in group else ())

    def load_part(group, name):
        raise RuntimeError("broken library")

    monkeypatch.setattr(module, "load_part", load_part)
    found = {check.name: check for check in module._parts()}
    assert found["training engine fsdp"].status == "missing"
    assert found["training engine fsdp"].found == "RuntimeError: broken library"
    assert found["replay buffer replay"].status == "missing"


def test_a_gpu_is_reported_with_the_options_that_reserve_it(monkeypatch):
    card = SimpleNamespace(name="NVIDIA H100", total_memory=80 << 30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: card)
    (check,) = module._torch()
    assert check.status == "ok"
    assert "NVIDIA H100 (80 GiB)" in check.found
    assert "--trainer.num-gpus and --rollout.num-gpus" in check.found


def test_this_machine_is_examined():
    checks = {check.name: check for check in examine()}
    assert checks["python"].status == "ok"
    assert checks["torch"].status == "ok"
    assert checks["torch build"].status == "ok"
    assert checks["rollout engine transformers"].found == "engines.rollout.transformers.engine:TransformersEngine"
    assert float(checks["cores"].found) > 0
