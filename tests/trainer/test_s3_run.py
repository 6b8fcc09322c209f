"""A bucket as the only storage, on a server of this machine: train, kill, resume, export, serve; and refusals."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import requests
import s3fs
import torch
from moto.s3.models import S3Backend
from moto.server import ThreadedMotoServer
from safetensors.torch import load_file

import asyncrl
from asyncrl.cli.main import main
from asyncrl.config import Config
from asyncrl.errors import StorageError
from asyncrl.interfaces import SamplingParams
from asyncrl.serve.server import Binding
from asyncrl.storage import Store, local_copy
from asyncrl.tasks.export import export
from asyncrl.tasks.run import evaluate, train

pytestmark = pytest.mark.slow


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """An S3 server with one bucket, ``bucket``, that this process and those it starts use; its address."""
    made = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    address = f"http://{host}:{port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "never-to-be-seen")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    s3fs.S3FileSystem.clear_instance_cache()
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield address
    requests.post(f"{address}/moto-api/reset", timeout=10)
    made.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def asyncrl_command(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    code = "from asyncrl.cli.main import main; raise SystemExit(main())"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.timeout(300)
def test_a_run_that_lost_its_machine_goes_on_from_the_bucket_and_is_served_from_it(
    server: str,
    small_config: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    def config(folder: str, **checkpoint: Any) -> Config:
        return small_config(
            runs=str(tmp_path / folder / "runs"),
            steps=5,
            max_staleness=0,
            rollout={"options": {"max_running_requests": 1}},
            checkpoint={"every": 2, "keep_last": 1, **checkpoint},
            weights={"transport": "store", "options": {"url": "s3://bucket/weights"}},
            telemetry={"progress": "plain"},
        )

    # The first machine dies while its checkpoint of step 4, or of the last step, is on its way.
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (first / "run.toml").write_text(config("first", url="s3://bucket/runs").to_toml())
    doomed = asyncrl_command("train", "run.toml", cwd=first)
    put_object = S3Backend.put_object

    def put(self: Any, bucket_name: str, key_name: str, *rest: Any, **more: Any) -> Any:
        if re.search("-step-00000[45]/.*model.safetensors$", key_name):
            doomed.send_signal(signal.SIGKILL)
        return put_object(self, bucket_name, key_name, *rest, **more)

    monkeypatch.setattr(S3Backend, "put_object", put)
    told, _ = doomed.communicate()
    assert doomed.returncode == -signal.SIGKILL, told
    monkeypatch.setattr(S3Backend, "put_object", put_object)
    shutil.rmtree(first)

    # The second has only the bucket.
    (name,) = {each.partition("/")[0] for each in Store("s3://bucket/runs").names()}
    url = f"s3://bucket/runs/{name}"
    folders = {each.partition("/")[0] for each in Store(url).names()}
    assert [each[-11:-1] for each in sorted(folders)] == ["step-00000"] * 2
    monkeypatch.chdir(second)
    assert main(["train", "--resume", url, "--runs", "runs"]) == 0
    told = capfd.readouterr().err
    assert re.search(r"step \d of 5", told)  # what was consumed meanwhile may be in the ledger's copy already
    run = second / "runs" / name
    calm = config("calm")
    train(calm)
    (calm_run,) = calm.runs.iterdir()
    last = Path("checkpoints") / "step-000005" / "model"
    expected, found = weights(calm_run / last), weights(run / last)
    assert all(torch.equal(tensor, found[each]) for each, tensor in expected.items())
    kept = {each.partition("/")[0] for each in Store(url).names()}
    assert [each[:7] + each[-11:] for each in kept] == ["000002-step-000005"]
    left = {each.partition("/")[0] for each in Store("s3://bucket/weights").names()}
    assert len(left) == 1  # of the first machine, which had no time to remove it
    shutil.rmtree(second)

    exported = export(url, "s3://bucket/models/mine")
    assert exported["weight_version"] == 5
    loaded = weights(local_copy("s3://bucket/models/mine"))
    assert all(torch.equal(tensor, loaded[each]) for each, tensor in expected.items())

    async def asked() -> Any:
        async with asyncrl.serve("s3://bucket/models/mine", binding=Binding(port=0)) as pool:
            return await pool.chat([{"role": "user", "content": "2 + 3 = ?"}])

    assert asyncio.run(asked())["role"] == "assistant"

    # Another run begins with this model, on rows that are there, too.
    rows = b'{"prompt": "2 + 3 = ?", "ground_truth": "5"}\n'
    Store("s3://bucket/rows").write("easy.jsonl", rows * 3)
    following = small_config(
        name="following",
        steps=1,
        model={"path": "s3://bucket/models/mine", "source": None, "options": {}},
        env={"name": "dataset", "options": {"files": "s3://bucket/rows/*.jsonl", "reward": "exact"}},
        eval={"tasks": 0},
    )
    assert train(following)["steps"] == 1
    scored = evaluate(following, checkpoint="s3://bucket/models/mine", data=["s3://bucket/rows/easy.jsonl"])
    assert scored["tasks"] == 3
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    assert secret not in told
    assert not any(secret.encode() in s3fs.S3FileSystem().cat_file(f"{url}/{each}") for each in Store(url).names())


@pytest.mark.timeout(300)
def test_a_pool_elsewhere_serves_what_a_run_has_announced_in_the_bucket(
    server: str, small_config: Callable[..., Config], tmp_path: Path
):
    url = "s3://bucket/weights"
    config = small_config(
        runs=str(tmp_path / "runs"),
        steps=3,
        checkpoint={"every": 3},
        weights={"transport": "store", "options": {"url": url, "kept_versions": 1}},
    )
    train(config)
    (run,) = config.runs.iterdir()
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)

    async def answers(model: Path, **options: Any) -> tuple[int, list[Any]]:
        async with asyncrl.serve(str(model), binding=Binding(port=0), **options) as pool:
            asked = [[{"role": "user", "content": f"{number} + 3 = ?"}] for number in range(4)]
            return pool.pool.weight_version, [await pool.chat(each, greedy) for each in asked]

    began_with = run / "model"
    version, found = asyncio.run(answers(began_with, follow=url))
    assert version == 3
    assert found == asyncio.run(answers(run / "checkpoints" / "step-000003" / "model"))[1]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no bucket", "s3://other/runs/.*: there is no such bucket"),
        ("refused", "s3://bucket/runs/.*: access is refused"),
        ("unreachable", r"s3://bucket/runs/.*: it cannot be used .*; check the connection"),
    ],
)
def test_a_bucket_that_cannot_be_used_ends_the_run_before_it_begins(
    server: str, small_config: Callable[..., Config], what: str, text: str, monkeypatch: pytest.MonkeyPatch
):
    if what == "refused":  # from now on only keys of users that the server has made are known to it
        requests.post(f"{server}/moto-api/reset-auth", data="0", timeout=10).raise_for_status()
    if what == "unreachable":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    config = small_config(checkpoint={"url": f"s3://{'other' if what == 'no bucket' else 'bucket'}/runs"})
    try:
        with pytest.raises(StorageError, match=text):
            train(config)
    finally:
        requests.post(f"{server}/moto-api/reset-auth", data="Infinity", timeout=10).raise_for_status()
    assert not config.runs.exists()
