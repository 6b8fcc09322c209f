"""Write the reference pages that follow from the code.

python docs/generate.py            # writes docs/reference/configuration.md and api.md
python docs/generate.py --check    # exit status 1 if they are not what the code says
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from pydantic import BaseModel

from asyncrl.config import Config, RewardTrainingConfig
from asyncrl.config.reference import OTHER_NAMES, Key, keys_of

REFERENCE = Path(__file__).parent / "reference"

HEAD = """<!-- Written by `python docs/generate.py`. -->

# Configuration

Every key of a configuration file, with its type, default and range. A key is written in its table of the TOML file
(`[trainer]`, `lr = 1e-4`) or on the command line (`--trainer.lr 1e-4`). `none` stands for an absent value.

"""

ELSEWHERE = """## Names in other systems

`asyncrl config num_generations` and the message about an unknown key find these. Values may differ: the pages on
migrating [from verl](../migrating-from-verl.md) and [from TRL](../migrating-from-trl.md) say how.

| here | verl | TRL | prime-rl |
|---|---|---|---|
"""

PUBLIC = {
    "asyncrl": "The names most programs need.",
    "asyncrl.data": "Batches and futures.",
    "asyncrl.single_controller": "Worker groups.",
    "asyncrl.single_controller.local": "The local backend.",
    "asyncrl.single_controller.ray": "The Ray backend.",
    "asyncrl.interfaces": "The contracts of engines, environments, buffers, rewards and trackers.",
    "asyncrl.weights": "Published weights and their transports.",
    "asyncrl.ledger": "The events of the ledger, and its contract.",
    "asyncrl.curriculum": "The choice of tasks by difficulty.",
    "asyncrl.staleness": "The admission law and the certificate of a batch.",
    "asyncrl.algorithms": "Advantages, losses, corrections, values and preferences.",
    "asyncrl.rollout.episode": "Episodes.",
    "asyncrl.rollout.trajectory": "Trajectories.",
    "asyncrl.rewards.rules": "Reward rules.",
    "asyncrl.envs.tools": "Tools.",
    "asyncrl.sandboxes.contract": "Sandboxes.",
    "asyncrl.sandboxes.pool": "A pool of sandboxes.",
    "asyncrl.tasks.handle": "Training, evaluation and generation from Python.",
    "asyncrl.tasks.settings": "Their arguments.",
    "asyncrl.tasks.run": "The commands as functions.",
    "asyncrl.tasks.rerun": "Recordings.",
    "asyncrl.plugins": "Parts by name.",
    "asyncrl.errors": "Every error.",
    "asyncrl.testing": "Fakes for tests.",
}
"""Modules of the Python reference."""


def configuration() -> str:
    """Return the page of all configuration keys."""
    parts = [HEAD, "## `asyncrl train`, `sft`, `eval`, `generate`\n\n", *_tables(Config)]
    parts += ["## `asyncrl train-reward-model`\n\n", *_tables(RewardTrainingConfig)]
    parts += [ELSEWHERE, *(_names(key, systems) for key, systems in OTHER_NAMES.items())]
    return "".join(parts).rstrip() + "\n"


def _tables(model: type[BaseModel]) -> Iterator[str]:
    for table, found in groupby(keys_of(model), key=lambda key: key.table):
        keys = list(found)
        yield f"### `[{table}]`\n\n{keys[0].about}\n\n" if table else ""
        yield "| key | type | default | range | |\n|---|---|---|---|---|\n" + "".join(map(_row, keys)) + "\n"


def _row(key: Key) -> str:
    default = key.default if key.default == "required" else f"`{key.default}`"
    cells = (f"`{key.name}`", key.type, default, key.range, key.text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _names(key: str, systems: Iterable[str]) -> str:
    cells = (", ".join(f"`{name}`" for name in names.split(", ") if name) for names in systems)
    return f"| `{key}` | {' | '.join(cells)} |\n"


def api() -> str:
    """Return the page of the public modules; mkdocstrings fills it from the docstrings."""
    parts = [
        "<!-- Written by `python docs/generate.py`. -->\n\n# Python\n\nThe public modules, from their docstrings.\n"
    ]
    for module, summary in PUBLIC.items():
        parts.append(f"\n## {module}\n\n{summary}\n\n::: {module}\n    options:\n      show_root_heading: false\n")
    return "".join(parts)


PAGES = {"configuration.md": configuration, "api.md": api}


def main() -> int:
    """Write the pages, or compare them with what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    REFERENCE.mkdir(exist_ok=True)
    stale = []
    for name, page in PAGES.items():
        path, text = REFERENCE / name, page()
        if check and (not path.is_file() or path.read_text(encoding="utf-8") != text):
            stale.append(str(path))
        elif not check:
            path.write_text(text, encoding="utf-8")
    for missing in stale:
        print(f"{missing} is not what the code says: run python docs/generate.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
