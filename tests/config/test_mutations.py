"""Whatever becomes of a configuration file, the command line says 0 or 2 and never shows a traceback."""

import contextlib
import io
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.cli.main import main

FILE = """name = "calculator"
seed = 1
steps = 60
max_staleness = 1

[cluster]
backend = "ray"
num_cpus = 4.0

[model]
source = "scratch"
options = {layers = 2, hidden_size = 64}
dtype = "float32"

[env]
name = "calculator"
latency_s = 0.05
max_turns = 4
[env.options]
min_operand = 2

[sft]
steps = 100
lr = 1e-3
lr_scheduler_type = "cosine"

[rollout]
replicas = 1
temperature = 1.0
stop = ["\\n\\n"]
max_new_tokens = 48
max_seq_len = 256

[trainer]
groups_per_step = 8
group_size = 8
lr = 3e-4
gradient_checkpointing = false

[algorithm]
advantage = "dr_grpo"
correction = "mis"
[algorithm.loss_options]
clip_ratio_high = 0.3

[buffer]
selection = "fifo"

[eval]
tasks = 64
on_start = true

[telemetry]
trackers = []
progress = "plain"
"""

ODD_VALUES = (
    "", "0", "-1", "1", "1.5", "true", "nan", "inf", "-inf", "1e400", "1e-400", "9" * 40, "9" * 5000, "0x" + "f" * 5000,
    '""', '"x"', '"../../etc"', '"\\u0000"', '"ünï¢ödé ☃"', '"\U0001f40d"', '"a:b"', '":"', '"a:"', '"..:x"',
    "'''a\nb'''",
    "[]", "[[]]", "[1, 'a']", "{}", "{a = 1}", "{a.b.c = [{d = 1}]}", "[" * 2000, "2026-01-02", "07:32:00",
    "2026-01-02T07:32:00Z", '"' + "y" * 10_000 + '"', '"~nobody-here/x"', '"%s{}"', "[nan]", "{name = 1}",
)  # fmt: skip


def mutate(text: str, randomness: random.Random) -> bytes:
    if "=" not in text:  # cut short before: nothing is left to mutate
        return text.encode()
    lines = text.splitlines()
    kind = randomness.randrange(10)
    at = randomness.randrange(len(lines))
    pick = lambda: randomness.choice(ODD_VALUES)  # noqa: E731
    if kind <= 2:  # another value
        pairs = [number for number, line in enumerate(lines) if "=" in line]
        at = randomness.choice(pairs)
        lines[at] = lines[at].partition("=")[0] + "= " + pick()
    elif kind == 3:  # another key
        pairs = [number for number, line in enumerate(lines) if "=" in line]
        at = randomness.choice(pairs)
        key, _, value = lines[at].partition("=")
        letters = list(key.strip())
        letters[randomness.randrange(len(letters))] = randomness.choice("aZ_9.-é\"' ")
        lines[at] = "".join(letters) + " =" + value
    elif kind == 4:  # a line gone, or twice
        lines[at : at + 1] = [lines[at]] * randomness.choice((0, 2))
    elif kind == 5:  # a line elsewhere: the wrong table
        lines.insert(randomness.randrange(len(lines)), lines.pop(at))
    elif kind == 6:  # a table nested wrongly
        lines.insert(
            at, randomness.choice(("[trainer.lr]", "[name]", "[[trainer]]", "[a.b.c]", "[env.options.x.y]", "[]"))
        )
    elif kind == 7:  # a new key
        lines.insert(at, f"{randomness.choice(('lr', 'a.b', 'options', '☃', 'steps.x'))} = {pick()}")
    content = "\n".join(lines).encode()
    if kind == 8:  # cut short
        content = content[: randomness.randrange(len(content))]
    elif kind == 9:  # junk bytes
        at = randomness.randrange(len(content))
        content = content[:at] + randomness.randbytes(randomness.randint(1, 8)) + content[at:]
    return content


def outcome(path, content: bytes, *settings: str) -> tuple[int, str]:
    path.write_bytes(content)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(["train", str(path), "--dry-run", *settings])
        except SystemExit as error:  # argparse's way to say 2
            code = int(error.code or 0)
    return code, out.getvalue() if code == 0 else err.getvalue()


def test_the_file_itself_is_right(tmp_path):
    code, text = outcome(tmp_path / "config.toml", FILE.encode())
    assert code == 0, text


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), times=st.integers(1, 3))
def test_any_mutation_is_accepted_or_refused_in_words(tmp_path_factory, seed, times):
    randomness = random.Random(seed)
    content = FILE.encode()
    for _ in range(times):
        content = mutate(content.decode(errors="replace"), randomness)
    check(tmp_path_factory, content)


@settings(max_examples=60, deadline=None)
@given(
    key=st.sampled_from(
        ["trainer.lr", "name", "runs", "env.options.x", "env.options", "steps", "model.path", "trainer"]
    )
    | st.text(max_size=8),
    value=st.sampled_from(ODD_VALUES) | st.text(max_size=12),
)
def test_any_setting_is_accepted_or_refused_in_words(tmp_path_factory, key, value):
    check(tmp_path_factory, FILE.encode(), f"--{key}={value}")


def check(tmp_path_factory, content: bytes, *settings: str) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.toml"
    code, text = outcome(path, content, *settings)
    assert code in {0, 2}, text
    assert "Traceback" not in text
    if code == 2:
        assert text.strip()
        assert len(text.splitlines()) <= 26
    elif not settings:  # what was accepted can be written down and read again; a run is resumed from it
        assert outcome(path, text.encode()) == (0, text)
