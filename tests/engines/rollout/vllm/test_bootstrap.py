"""The hook in a configuration runs in the processes that are spawned with it."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import tempfile

import psutil
import pytest

from engines.rollout.vllm.bootstrap import BootstrapHook

PROGRAM = """
import multiprocessing, os, signal, sys, tempfile
from engines.rollout.vllm.bootstrap import BootstrapHook

def work(config):
    print(os.getpid(), tempfile.gettempdir(), os.environ.get("TORCHINDUCTOR_CACHE_DIR"), flush=True)
    signal.pause()

if __name__ == "__main__":
    config = {"additional_config": {"asyncrl": BootstrapHook(sys.argv[1])}}
    multiprocessing.get_context("spawn").Process(target=work, args=(config,)).start()
    print("parent", tempfile.tempdir, flush=True)
    signal.pause()
"""


@pytest.mark.slow
def test_a_process_spawned_with_it_ends_with_its_parent_and_keeps_its_files_in_the_folder(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "parent None\n"
        number, folder, cache = program.stdout.readline().split()
        child = psutil.Process(int(number))
        assert folder == str(tmp_path)
        assert os.path.dirname(cache) == tempfile.gettempdir(), "compiled code is kept"  # noqa: PTH120
    finally:
        program.kill()
        program.wait()
        program.stdout.close()
    _, alive = psutil.wait_procs([child], timeout=20)
    for each in alive:
        each.kill()
    assert not alive


def test_anywhere_else_it_is_a_constant_string(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/here")
    hooks = [BootstrapHook("/one"), BootstrapHook("/two"), copy.deepcopy(BootstrapHook("/three")), BootstrapHook(None)]
    hooks.append(pickle.loads(pickle.dumps(BootstrapHook("/four"))))
    assert len({json.dumps({"asyncrl": hook}) for hook in hooks}) == 1
    assert [hook.folder for hook in hooks] == ["/one", "/two", "/three", None, "/four"]
    assert tempfile.gettempdir() == "/here"
