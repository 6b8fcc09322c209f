"""What a DataProto costs beyond the bytes it carries.

    python benchmarks/data.py [--json] [--rounds 15]

Every figure has a floor, measured in the same run, alternating with it; figures are medians over the rounds. The
floors: Ray's store with bare numpy arrays over the same memory (object_store_64mb); torch on the same tensors (unpad,
chunk, concat, shuffle), or memcpy of the same bytes (shuffle_64mb_ragged, codec_64mb); a plain file of the same bytes,
flushed to disk alike (save, load); an import of torch alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.data import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from asyncrl.data.codec import decode, encode
from asyncrl.data.ragged import offsets_from_lengths, ragged_from_values, values_of

SIZE_BYTES = 64 << 20


def dense(size_bytes: int = SIZE_BYTES) -> DataProto:
    """1024 rows in two columns of half the bytes each."""
    half = size_bytes // 2 // 1024
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.ones(1024, half // 8, dtype=torch.int64),
            "log_probs": torch.ones(1024, half // 4, dtype=torch.float32),
        },
        meta_info={"step": 1},
    )


def ragged(size_bytes: int = SIZE_BYTES) -> DataProto:
    """1024 rows of differing lengths: 8 bytes of ids, 4 of log-probs and 4 of advantages for each token."""
    dice = np.random.default_rng(0)
    lengths = dice.integers(1, 2 * size_bytes // 16 // 1024, 1024)
    offsets = offsets_from_lengths(torch.from_numpy(lengths))
    total = int(offsets[-1])
    return DataProto.from_dict(
        tensors={
            "input_ids": ragged_from_values(torch.ones(total, dtype=torch.int64), offsets),
            "log_probs": ragged_from_values(torch.ones(total), offsets),
            "advantages": ragged_from_values(torch.ones(total), offsets),
        }
    )


def alternate(rounds: int, ours: Callable[[], object], floor: Callable[[], object]) -> tuple[float, float]:
    """Median seconds of both, after one round that does not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        for side in order:
            started = time.perf_counter()
            (ours, floor)[side]()
            elapsed = time.perf_counter() - started
            if number:
                times[side].append(elapsed)
    return statistics.median(times[0]), statistics.median(times[1])


def figure(name: str, times_s: tuple[float, float], goal_ratio: float, *, unit: str = "ms") -> dict[str, Any]:
    scale = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    value, floor = (seconds * scale for seconds in times_s)
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "floor": round(floor, 3),
        "ratio": round(value / floor, 2),
        "goal": f"at most {goal_ratio} x floor",
        "holds": value <= goal_ratio * floor,
    }


@contextmanager
def cluster() -> Iterator[Any]:
    import ray

    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=12 * SIZE_BYTES, logging_level=logging.ERROR)
    try:
        # Memory is slow when it is first touched: touch all of the store before anything is measured.
        held = [ray.put(np.ones(SIZE_BYTES, dtype=np.uint8)) for _ in range(10)]
        del held
        yield ray
    finally:
        ray.shutdown()


def _through_store(ray: Any, value: object) -> None:
    ray.get(ray.put(value))


def object_store(rounds: int) -> list[dict[str, Any]]:
    figures = []
    with cluster() as ray:
        for name, data in (("object_store_64mb", dense()), ("object_store_64mb_ragged", ragged())):
            # The very same memory: numpy would put an array of its own on huge pages, which copy faster.
            arrays = [np.asarray(buffer) for buffer in encode(data).buffers]
            through_store = partial(_through_store, ray)
            times = alternate(rounds, partial(through_store, data), partial(through_store, arrays))
            figures.append(figure(name, times, 1.1))
    return figures


def in_memory(rounds: int) -> list[dict[str, Any]]:
    figures = []
    data = dense(201 << 20)
    padded, pad_size = pad_dataproto_to_divisor(data[:-1], 1024)
    tensors = padded.columns().tensors

    def cut() -> None:
        for tensor in tensors.values():
            tensor[:-1]

    figures.append(
        figure(
            "unpad_201mb",
            alternate(rounds, lambda: unpad_dataproto(padded, pad_size), cut),
            50,
            unit="us",
        )
    )

    def torch_chunks() -> None:
        for tensor in tensors.values():
            tensor.chunk(8)

    figures.append(figure("chunk_201mb", alternate(rounds, lambda: padded.chunk(8), torch_chunks), 50, unit="us"))

    chunks = dense().chunk(8)
    parts = [[chunk.columns().tensors[name] for chunk in chunks] for name in ("input_ids", "log_probs")]
    times = alternate(rounds, lambda: DataProto.concat(chunks), lambda: [torch.cat(part) for part in parts])
    figures.append(figure("concat_64mb", times, 1.1))

    order = np.random.default_rng(0).permutation(1024)
    data, index = dense(), torch.from_numpy(order)
    columns = data.columns().tensors
    times = alternate(
        rounds, lambda: data.select_idxs(order), lambda: [each.index_select(0, index) for each in columns.values()]
    )
    figures.append(figure("shuffle_64mb", times, 1.1))

    jagged = ragged()
    values = [values_of(column) for column in jagged.columns().tensors.values()]
    times = alternate(rounds, lambda: jagged.select_idxs(order), lambda: [each.clone() for each in values])
    figures.append(figure("shuffle_64mb_ragged", times, 5))

    encoded = encode(dense())

    def there_and_back() -> None:
        again = encode(data)
        decode(again.header, again.buffers)

    copied = bytearray(encoded.size_bytes)

    def copy() -> None:
        for buffer in encoded.buffers:
            copied[: buffer.nbytes] = buffer

    figures.append(figure("codec_64mb", alternate(rounds, there_and_back, copy), 0.1))
    return figures


def disk(rounds: int) -> list[dict[str, Any]]:
    data = dense()
    encoded = encode(data)
    with tempfile.TemporaryDirectory() as folder:
        ours, plain = Path(folder) / "ours", Path(folder) / "plain"

        def write() -> None:
            with plain.open("wb") as file:
                for buffer in encoded.buffers:
                    file.write(buffer)
                file.flush()
                os.fsync(file.fileno())

        def read() -> None:
            content = np.empty(plain.stat().st_size, dtype=np.uint8)
            with plain.open("rb") as file:
                file.readinto(content.data)

        saving = figure("save_64mb", alternate(rounds, lambda: data.save_to_disk(ours), write), 1.5)
        loading = figure("load_64mb", alternate(rounds, lambda: DataProto.load_from_disk(ours), read), 2)
        return [saving, loading]


def imports(rounds: int) -> list[dict[str, Any]]:
    def importing(module: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True)

    times = alternate(max(2, rounds // 5), importing("asyncrl.data.proto"), importing("torch"))
    return [figure("import", times, 1.2, unit="s")]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_argument("--rounds", type=int, default=15)
    options = arguments.parse_args()

    torch.set_num_threads(1)
    figures = [measured for part in (object_store, in_memory, disk, imports) for measured in part(options.rounds)]
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "torch_threads": 1,
    }
    if options.json:
        print(json.dumps({"machine": machine, "figures": figures}))
        return
    for each in figures:
        print(
            f"{each['name']:50s} {each['value']:>10} {each['unit']:3s} floor {each['floor']:>10}  "
            f"x{each['ratio']:<7} goal: {each['goal']}: {'holds' if each['holds'] else 'does not hold'}"
        )


if __name__ == "__main__":
    main()
