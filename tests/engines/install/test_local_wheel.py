"""pip and importlib accept the wheels that write_wheel generates."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

from engines.install.venv import LocalDistribution, write_wheel

SHIM = LocalDistribution(
    name="some-shim", version="1.2+cpu", summary="for a test", modules={"some_shim/__init__.py": "ANSWER = 42\n"}
)


def test_pip_installs_the_wheel_without_an_index(tmp_path: Path) -> None:
    wheel = write_wheel(SHIM, tmp_path)
    target = tmp_path / "target"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(target)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    (found,) = distributions(path=[str(target)])
    assert (found.name, found.version, found.metadata["Summary"]) == ("some-shim", "1.2+cpu", "for a test")
    assert (target / "some_shim" / "__init__.py").read_text() == "ANSWER = 42\n"


def test_the_same_distribution_gives_the_same_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    first, second = (write_wheel(SHIM, folder) for folder in folders)
    assert first.name == "some_shim-1.2+cpu-py3-none-any.whl"
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        assert archive.testzip() is None
        assert archive.read("some_shim-1.2+cpu.dist-info/RECORD").decode().count("sha256=") == 3
