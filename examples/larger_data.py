"""Makes the files of examples/larger.toml: questions in verl's columns, and demonstrations of them.

    python examples/larger_data.py        # data/larger/{train,test}.parquet and demonstrations.jsonl

"17 or 52?" asks for the larger number. Demonstrations say either of the two, by a coin, so a model that learns from
them is right every other time; which one is larger it has to find out by reward.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def question(index: int, *, split: str) -> dict[str, Any]:
    """One row, as verl's own preprocessing scripts write them."""
    draw = random.Random(f"{split}/{index}")
    first, second = draw.sample(range(10, 100), 2)
    return {
        "data_source": "larger",
        "prompt": [{"role": "user", "content": f"{first} or {second}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(max(first, second))},
        "extra_info": {"index": index, "split": split, "difference": abs(first - second)},
    }


def demonstration(index: int) -> dict[str, Any]:
    row = question(index, split="demonstrations")
    asked = row["prompt"][0]["content"]
    said = random.Random(index).choice(asked.removesuffix("?").split(" or "))
    return {"messages": [*row["prompt"], {"role": "assistant", "content": said}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("data/larger"))
    parser.add_argument("--rows", type=int, default=2000)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", arguments.rows), ("test", 256)):
        table = pa.Table.from_pylist([question(index, split=split) for index in range(rows)])
        pq.write_table(table, arguments.folder / f"{split}.parquet")
    with (arguments.folder / "demonstrations.jsonl").open("w") as file:
        for index in range(arguments.rows):
            file.write(json.dumps(demonstration(index)) + "\n")
    print(f"{arguments.rows} questions to train on, 256 to test, in {arguments.folder}")


if __name__ == "__main__":
    main()
