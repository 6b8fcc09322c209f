"""The command line: what it starts, what it prints, which exit code it ends with."""

import io
import json
import os
import signal
import subprocess
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pytest

from asyncrl import errors
from asyncrl.cli import commands
from asyncrl.cli.main import main
from asyncrl.cli.output import show_status
from asyncrl.runtime import Terminated
from asyncrl.telemetry import RunDirectory
from asyncrl.trainer.evaluation import Estimate

FILE = 'name = "first"\nsteps = 10\n[model]\nsource = "scratch"\n[env]\nname = "calculator"\n'


ANSWERS = {"checkpoint": None, "data": None, "tasks": None, "samples": 1, "temperature": None, "out": None}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def pipeline(monkeypatch):
    """Stands in for the loop: keeps what it was called with."""
    module = types.ModuleType("asyncrl.tasks.run")
    module.calls = []

    def keep(name, result):
        def call(config, **arguments):
            module.calls.append((name, config, arguments))
            return result

        setattr(module, name, call)

    keep("train", {"steps": 10, "weight_version": 10, "success_before": 0.25, "success_after": 0.5})
    keep("sft", {"model": "somewhere", "wall_s": 1.5})
    scores = {"avg@1": Estimate(0.5, 0.25, 0.75)}
    keep(
        "evaluate", {"tasks": 128, "scores": scores, "by_data_source": {"gsm8k": scores}, "reward_parts": {"math": 1.0}}
    )
    keep("generate", [{"text": "2+2=4", "reward": 1.0}, {"text": "ü", "reward": float("nan")}])
    monkeypatch.setitem(sys.modules, "asyncrl.tasks.run", module)
    return module


def run(*words):
    try:
        return main([str(word) for word in words])
    except SystemExit as error:
        return error.code


def test_train_hands_the_configuration_over_and_prints_the_report(file, pipeline, capsys):
    assert run("train", "--seed", "3", file, "--trainer.lr=1e-3", "--env.options.digits", 2) == 0
    [(name, config, arguments)] = pipeline.calls
    assert (name, config.seed, config.trainer.lr, config.env.options) == ("train", 3, 1e-3, {"digits": 2})
    assert arguments == {"resume": None}
    assert "held-out success  0.250 -> 0.500" in capsys.readouterr().out


def test_json_is_json(file, pipeline, capsys):
    assert run("train", file, "--json") == 0
    assert json.loads(capsys.readouterr().out)["success_after"] == 0.5


def test_a_resumed_run_uses_its_own_configuration(file, pipeline):
    assert run("train", "--resume", file.parent, "--steps", 20) == 0
    [(_, config, arguments)] = pipeline.calls
    assert (config.name, config.steps, arguments) == ("first", 20, {"resume": file.parent})


def test_the_page_beside_a_run_shows_the_folder_that_it_is_in(file, pipeline, monkeypatch):
    shown = []
    monkeypatch.setattr(commands, "page_beside", lambda folder: nullcontext(shown.append(folder)))
    assert run("train", file, "--page") == 0
    assert run("train", "--page", "--resume", file.parent) == 0
    assert shown == [Path("runs"), file.parent.parent]


def test_sft_and_eval(file, pipeline, capsys):
    assert run("sft", file) == 0
    assert run("eval", file, "--checkpoint", file.parent, "--eval.tasks", 7) == 0
    assert [(name, arguments) for name, _, arguments in pipeline.calls] == [
        ("sft", {}),
        ("evaluate", {**ANSWERS, "checkpoint": file.parent}),
    ]
    assert pipeline.calls[1][1].eval.tasks == 7
    out = capsys.readouterr().out
    assert "model   somewhere" in out
    assert "avg@1         0.5000  [0.2500, 0.7500]" in out
    assert "gsm8k  avg@1  0.5000" in out


def test_generate_prints_json_lines(file, pipeline, capsys):
    assert run("generate", file, "--prompt", "2+2=", "--tasks", 2, "--samples=3", "--temperature", 0.5) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"text": "2+2=4", "reward": 1.0}, {"text": "ü", "reward": None}]
    more = {"prompt": "2+2=", "tasks": 2, "samples": 3, "temperature": 0.5}
    assert pipeline.calls[0][2] == {**ANSWERS, **more}


def test_generate_into_a_file_prints_nothing(file, pipeline, tmp_path, capsys):
    assert run("generate", file, "--out", tmp_path / "x.jsonl") == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("command", ["train", "sft", "eval", "generate"])
def test_a_dry_run_starts_nothing_and_prints_a_usable_file(command, file, pipeline, tmp_path, capsys):
    assert run(command, file, "--dry-run", "--max-staleness", 4) == 0
    assert pipeline.calls == []
    (tmp_path / "resolved.toml").write_text(capsys.readouterr().out)
    assert run("train", tmp_path / "resolved.toml") == 0
    assert pipeline.calls[0][1].max_staleness == 4


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train"], "no configuration given"),
        (["train", "absent.toml"], "absent.toml: no such file"),
        (["train", "FILE", "--seed"], "--seed needs a value"),
        (["train", "FILE", "--sede", "3"], "sede: no such key; did you mean seed?"),
        (["train", "FILE", "--dryrun"], "unknown option --dryrun; did you mean --dry-run?"),
        (["train", "--dry-rum", "FILE"], "unknown option --dry-rum; did you mean --dry-run?"),
        (["plot", "--ot", "x.png", "FILE"], "unknown option --ot; did you mean --out?"),
        (["train", "FILE", "--steps", "-1"], "steps = -1"),
        (["train", "FILE", "again"], "unrecognized arguments: again"),
        (
            ["train", "FILE", "--dry-run", "--env.name", "calcu"],
            "no environment named 'calcu'; did you mean 'calculator'?",
        ),
        (["train", "FILE", "--dry-run", "--telemetry.trackers", "nope"], "telemetry.trackers: no tracker named 'nope'"),
        (["train", "FILE", "--dry-run", "--sft.data", "absent.jsonl"], "sft.data: 'absent.jsonl': no such file"),
        (
            ["train", "FILE", "--dry-run", "--rollout.python", "absent/python"],
            "rollout.python = 'absent/python': no such file",
        ),
        (
            ["train", "FILE", "--dry-run", "--model.source", "none", "--model.path", "/absent"],
            "model.path = '/absent': no such",
        ),
        (["eval", "FILE", "--checkpoint", "/absent"], "--checkpoint = '/absent': no such"),
        (["generate", "FILE", "--tasks", "0"], "not a whole number from 1"),
        (["generate", "FILE", "--temperature", "hot"], "not a number from 0 to 100"),
        (["generate", "FILE", "--data", "absent.parquet"], "--data: 'absent.parquet': no such file"),
        (["eval", "--answers", "absent.jsonl"], "'absent.jsonl': no such file"),
        (["export", "absent"], "--out"),
        (["plot", "absent"], "absent: not the folder of a run"),
        (["plot", "absent", "--bogus"], "unrecognized arguments: --bogus"),
        (["trian"], "no command 'trian'; did you mean `asyncrl train`?"),
        (["first.toml"], "no command 'first.toml'; did you mean `asyncrl train first.toml`?"),
        (["--bogus"], "unrecognized arguments: --bogus"),
    ],
)
def test_wrong_usage_ends_with_2_and_a_message(words, text, file, pipeline, capsys):
    assert run(*[file if word == "FILE" else word for word in words]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "Traceback" not in err
    assert pipeline.calls == []


def fail_with(pipeline, error):
    def train(config, *, resume=None):
        raise error

    pipeline.train = train


def test_a_known_failure_is_named_on_one_screen(file, pipeline, capsys, monkeypatch):
    remote = "\n".join(f"frame {number}" for number in range(500))
    error = errors.WorkerError("update failed", group="trainer", rank=1, method="update", remote_traceback=remote)
    error.__cause__ = ValueError("bad shape of https://host/a?sig=abc")
    fail_with(pipeline, error)
    assert run("train", file) == 1
    err = capsys.readouterr().err
    assert "error: WorkerError: update failed" in err
    for part in (
        "group: trainer",
        "rank: 1",
        "frame 499",
        "caused by ValueError: bad shape of https://host/a?...",
        "--traceback",
    ):
        assert part in err
    assert "Traceback" not in err
    assert len(err.splitlines()) < 24

    assert run("train", file, "--traceback") == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("ASYNCRL_TRACEBACK", "1")
    assert run("train", file) == 1
    assert "Traceback" in capsys.readouterr().err


def test_notes_are_printed_in_lines_and_a_group_is_not_a_cause(file, pipeline, capsys):
    error = errors.EnvironmentFailure("reset failed")
    error.add_note("raised on rank 0; traceback there:\n" + "\n".join(f"frame {number}" for number in range(500)))
    error.__cause__ = ExceptionGroup("stages", [error])
    fail_with(pipeline, error)
    assert run("train", file) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["error: EnvironmentFailure: reset failed", "  raised on rank 0; traceback there:"]
    assert lines[2:-1] == [f"    frame {number}" for number in range(492, 500)]


def test_failures_of_a_task_group_are_counted(file, pipeline, capsys):
    group = ExceptionGroup("tasks", [errors.EngineError("out of memory"), errors.WeightError("torn")])
    fail_with(pipeline, ExceptionGroup("outer", [group]))
    assert run("train", file) == 1
    err = capsys.readouterr().err
    assert "error: EngineError: out of memory" in err
    assert "and 1 more: WeightError" in err


def test_a_bug_shows_its_traceback(file, pipeline, capsys):
    fail_with(pipeline, ZeroDivisionError("division by zero"))
    assert run("train", file) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ZeroDivisionError" in err
    assert "a bug" in err


def test_a_configuration_error_of_the_run_ends_with_2(file, pipeline, capsys):
    fail_with(pipeline, errors.ConfigError("this will not do", path="rollout.engine", remedy="take another"))
    assert run("train", file) == 2
    assert capsys.readouterr().err == "error: this will not do\n  at rollout.engine\n  take another\n"


def test_ctrl_c_ends_with_130(file, pipeline, capsys):
    fail_with(pipeline, KeyboardInterrupt())
    assert run("train", file) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("error", "status", "said"), [(KeyboardInterrupt(), 130, "interrupted\n"), (Terminated(), 143, "")]
)
def test_an_interruption_says_how_to_go_on(error, status, said, file, pipeline, capsys):
    error.add_note("go on with: asyncrl train --resume runs/x")
    fail_with(pipeline, error)
    assert run("train", file) == status
    assert capsys.readouterr().err == f"{said}go on with: asyncrl train --resume runs/x\n"


def test_plot_draws_a_run(tmp_path, capsys):
    with RunDirectory.create(tmp_path, "first") as folder:
        folder.log_metrics({"reward_mean": 0.5}, step=1, version=1)
    assert run("plot", folder.path, "--out", tmp_path / "x.svg") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'x.svg'}\n"


# ------------------------------------------------------------------------------------------------- as a process

WAITS_FOR_A_SIGNAL = """
import signal, sys, types
module = types.ModuleType("asyncrl.tasks.run")
def train(config, *, resume=None):
    try:
        print("ready", flush=True)
        while True:
            signal.pause()
    finally:
        print("cleaned up", flush=True)
module.train = train
sys.modules["asyncrl.tasks.run"] = module
from asyncrl.cli.main import main
from asyncrl.cli.output import show_status
sys.exit(main())
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_unwind_the_program(number, code, file):
    with subprocess.Popen(
        [sys.executable, "-c", WAITS_FOR_A_SIGNAL, "train", str(file)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == "cleaned up\n"
        assert process.wait(20) == code


@pytest.mark.slow
def test_a_closed_pipe_is_not_an_error(file):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "asyncrl", "train", str(file), "--dry-run"]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_status_that_nobody_reads_ends_no_program():
    reading, writing = os.pipe()
    os.close(reading)
    program = "from asyncrl.cli.output import show, show_status; show_status('a'); show_status('b'); show('done')"
    try:
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=writing, timeout=60)
    finally:
        os.close(writing)
    assert (done.returncode, done.stdout) == (0, b"done\n")


def test_a_status_that_cannot_be_written_ends_no_program(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    show_status("a")


@pytest.mark.parametrize("where", ["config.toml", "."])
def test_why_names_what_is_not_the_folder_of_a_run(where, file, capsys):
    assert run("why", file.parent / where) == 2
    error, remedy = capsys.readouterr().err.splitlines()
    assert str(file.parent) in error
    assert remedy == "  give the folder of a run that trains"


def test_help_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys, time; begin = time.process_time()\n"
        "from asyncrl.cli.main import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'ray', 'transformers', 'numpy', 'pydantic', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "print('\\n', time.process_time() - begin, sorted(heavy))"
    )
    best_s = 1.0
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        seconds, _, heavy = out.splitlines()[-1].strip().partition(" ")
        assert heavy == "[]"
        best_s = min(best_s, float(seconds))
    assert best_s < 0.25


@pytest.mark.parametrize("command", [["pool", "ps", "--control", "http://127.0.0.1:1"], ["why", "no-run"]])
def test_commands_on_what_runs_load_no_arrays(command):
    code = (
        "import sys\n"
        "from asyncrl.cli.main import main\n"
        f"main({command})\n"
        "print({'torch', 'ray', 'transformers', 'numpy', 'pydantic', 'rich', 'aiohttp.web'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("words", [["train", "bad\udcff"], ["train", "--resume", "x\udcff"], ["why", "\udcff"]])
def test_a_path_that_is_not_utf_8_is_refused(words, pipeline, capsys):
    assert run(*words) == 2
    assert "udcff' is not UTF-8: rename it, or run in its folder" in capsys.readouterr().err


def test_a_module_of_the_folder_one_runs_in_is_found(file):
    (file.parent / "my_environment.py").touch()
    (file.parent / "bin").mkdir()
    script = file.parent / "bin" / "asyncrl"  # as pip makes it: its own folder is on the path, and not where it is run
    script.write_text("import sys; from asyncrl.cli.main import main; sys.exit(main())")
    command = [sys.executable, str(script), "train", str(file), "--dry-run", "--env.name", "my_environment:Mine"]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(command, cwd=file.parent, env=environment, capture_output=True, timeout=60)
    assert b"my_environment has no 'Mine'" in done.stderr


@pytest.mark.slow
def test_a_terminal_without_unicode(file):
    command = [sys.executable, "-m", "asyncrl", "train", str(file), "--dry-run", "--rollout.stop=ü"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0
    assert b'stop = ["\\xfc"]' in done.stdout


def test_the_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("asyncrl 0.")
    assert run() == 0
    assert "doctor" in capsys.readouterr().out
