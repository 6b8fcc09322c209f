"""What a configuration does to the processes that are spawned with it."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import tempfile

import psutil

from engines.rollout.vllm_adapter.first_act import FirstAct

PROGRAM = """
import multiprocessing, os, signal, sys, tempfile
from engines.rollout.vllm_adapter.first_act import FirstAct

def work(config):
    print(os.getpid(), tempfile.gettempdir(), os.environ.get("TORCHINDUCTOR_CACHE_DIR"), flush=True)
    signal.pause()

if __name__ == "__main__":
    config = {"additional_config": {"asyncrl": FirstAct(sys.argv[1])}}
    multiprocessing.get_context("spawn").Process(target=work, args=(config,)).start()
    print("not looked for before", tempfile.tempdir, flush=True)
    signal.pause()
"""


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
        assert program.stdout.readline() == "not looked for before None\n"
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


def test_anywhere_else_it_is_a_text_that_does_not_change(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/here")
    acts = [FirstAct("/one"), FirstAct("/two"), copy.deepcopy(FirstAct("/three")), FirstAct(None)]
    acts.append(pickle.loads(pickle.dumps(FirstAct("/four"))))
    assert len({json.dumps({"asyncrl": act}) for act in acts}) == 1
    assert [act.folder for act in acts] == ["/one", "/two", "/three", None, "/four"]
    assert tempfile.gettempdir() == "/here"
