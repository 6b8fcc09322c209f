"""vLLM's and SGLang's own tests of an OpenAI server, against ``asyncrl serve``.

    python benchmarks/openai_compatibility.py vllm --tests VLLM_SOURCE --python .venv-vllm/bin/python --model FOLDER
    python benchmarks/openai_compatibility.py sglang --python .venv-sglang/bin/python --model FOLDER
        [--engine sglang --engine-python .venv-sglang/bin/python] [--only FILE] [--json]

vLLM's tests are in its source (the sdist), of the version that ``--python`` has; they start ``vllm serve`` through one
class, which here has the address of a server that runs already, under all the names of models that the tests use.
SGLang's are mixins of its package, which get that address. ``--python`` needs pytest, pytest-asyncio and tblib besides
(``--path`` adds a folder that has them). Only tests that reach a server are run. Each has

    passed      as written upstream
    refused     the answer was an error that names a field, value or address that is not served
    alone       it needs something that only their server, another model or the network has: ALONE says what
    failed      anything else

Small models answer badly, so read the reasons of failures. This file is also the plugin of pytest that does all this,
in an interpreter without asyncrl.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VLLM_TESTS = (
    *(f"openai/{each}" for each in ("chat_completion", "completion", "models", "responses/test_simple.py")),
    *(f"openai/test_{each}.py" for each in ("chunked_prompt", "return_token_ids", "return_tokens_as_ids")),
    *("anthropic/test_messages.py", "serve/instrumentator/test_basic.py", "serve/tokenize/test_tokenization.py"),
    *("scale_out/token_in_token_out/test_serving_tokens.py", "../tool_use"),
)
SGLANG_KITS = {
    "anthropic_messages_kit": "AnthropicMessagesMixin",
    "basic_api_contract_kit": "BasicAPIContractMixin",
    "basic_decode_correctness_kit": "BasicDecodeCorrectnessMixin",
    "basic_scheduler_stress_kit": "BasicSchedulerStressMixin",
    "ebnf_constrained_kit": "EBNFConstrainedMixin",
    "json_constrained_kit": "JSONConstrainedMixin",
    "json_mode_kit": "JSONModeMixin",
    "matched_stop_kit": "MatchedStopMixin",
    "reasoning_kit": "ReasoningTokenUsageMixin",
    "regex_constrained_kit": "RegexConstrainedMixin",
}
ALONE = {  # what it needs, by a pattern of the test's name
    r"zephyr-lora|lora_adapter|test_check_models": "LoRA adapters by name",
    r"prompt_embeds": "prompts of embeddings",
    r"test_batched_chat": "their address for batches",
    r"include_reasoning|thinking_token_budget|test_reasoning|reasoning_tokens|_types\[Qwen|reasoning_kit": "reasoning",
    r"test_max_tokens\[Qwen/Qwen3-8B": "a template with reasoning_effort",
    r"test_tensorizer": "tensorizer",
    r"root_path|force_include_usage|server_load|tokenizer_info|sampling_mask|tokens_only": "an option of the server",
    r"cache_usage|test_single_completion|ids_completion\[True": "an option of the server",
    r"chat_echo.*test_(prompt|top)_logprobs": "an option of the server",
    r"test_invocations": "SageMaker's address",
    r"kv_transfer": "transfers between prefill and decode servers",
    r"extra_content_fields|image": "a model of images",
    r"test_token_in_token_out_and": "a model that is downloaded",
    r"test_show_version": "their version's number",
    r"test_render_then|abort_requests|delivers_abort": "their addresses to render and to abort",
    r"health_generate|server_info|model_info": "their addresses of a server's state",
    r"test_finish_(length|stop_str|stop_eos)": "matched_stop in answers",
}
REFUSED = re.compile(r"not served|Invalid enum value|nothing under this address|at most \d+ .* accepted")
MODEL_NAME = re.compile(r"""["']([A-Za-z][\w-]+/[\w.-]+)["']""")
DEADLINE_S = 120


# ------------------------------------------------------------------------------------------------ plugin of pytest

_errors: list[str] = []


def pytest_load_initial_conftests() -> None:
    """Before the tests' own files are read: give them our address, and the tokenizer of our model."""
    import transformers

    folder, port = os.environ["COMPATIBILITY_MODEL"], int(os.environ["COMPATIBILITY_PORT"])
    _keep_errors()
    from_pretrained: Any = transformers.AutoTokenizer.from_pretrained
    transformers.AutoTokenizer.from_pretrained = lambda *_, **__: from_pretrained(folder)
    if os.environ["COMPATIBILITY_SUITE"] != "vllm":
        return
    import vllm.tokenizers
    from vllm.transformers_utils import repo_utils

    get_tokenizer: Any = vllm.tokenizers.get_tokenizer
    vllm.tokenizers.get_tokenizer = lambda *_, **__: get_tokenizer(folder)
    repo_utils.hf_api = lambda *_, **__: type("Hub", (), {"snapshot_download": lambda *_, **__: folder})()
    upstream = importlib.import_module("tests.utils")

    class Server(upstream.RemoteOpenAIServer):  # type: ignore[name-defined, misc]
        def __init__(self, *_: Any, **__: Any) -> None:
            self.uds, self.host, self.port, self.show_hidden_metrics = None, "127.0.0.1", port, False

        def __exit__(self, *_: object) -> None: ...

    upstream.RemoteOpenAIServer = Server


def _keep_errors() -> None:
    """Note each error that a server answers with."""
    import requests

    def note(response: Any) -> Any:
        if response.status_code >= 400:
            _errors.append(f"{response.status_code} {response.text[:300]}")
        return response

    ask: Any = requests.Session.send
    requests.Session.send = lambda *given, **named: note(ask(*given, **named))  # type: ignore[method-assign]
    for name in ("httpx", "httpx2"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            send, asend = module.Client.send, module.AsyncClient.send

            def noting(*given: Any, _send: Any = send, **named: Any) -> Any:
                response = _send(*given, **named)
                if response.status_code >= 400:
                    response.read()
                return note(response)

            async def anoting(*given: Any, _send: Any = asend, **named: Any) -> Any:
                response = await _send(*given, **named)
                if response.status_code >= 400:
                    await response.aread()
                return note(response)

            module.Client.send, module.AsyncClient.send = noting, anoting


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep the tests that reach a server, and let them name our model."""
    fixtures = {"server", "client", "server_fixture"}
    suite = os.environ["COMPATIBILITY_SUITE"]
    items[:] = [
        each
        for each in items
        if suite == "sglang"
        or fixtures & set(each.fixturenames)
        or "RemoteOpenAIServer" in inspect.getsource(each.function)
    ]
    for each in items:
        if hasattr(each.module, "MODEL_NAME"):
            each.module.MODEL_NAME = os.environ["COMPATIBILITY_MODEL"]


def pytest_runtest_setup(item: Any) -> None:
    import pytest

    _errors.clear()
    for pattern, what in ALONE.items():
        if re.search(pattern, item.nodeid):
            pytest.skip(f"ALONE {what}")


def pytest_runtest_call() -> None:
    def late(*_: object) -> None:
        raise TimeoutError(f"no end after {DEADLINE_S} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(DEADLINE_S)


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call":
        signal.alarm(0)
    if report.when == "teardown" or (report.when == "setup" and report.passed):
        return
    outcome, reason = "passed", ""
    if hasattr(report, "wasxfail"):
        outcome, reason = "alone", "they expect it to fail"
    elif report.skipped:
        reason = str(report.longrepr[2]).removeprefix("Skipped: ").removeprefix("ALONE ")
        outcome = "alone"
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = " ".join((crash.message if crash is not None else str(report.longrepr)).split())[:200]
        named = [each for each in _errors if REFUSED.search(each)]
        outcome = "refused" if named else "failed"
        reason = named[-1] if named else reason + (f" <- {_errors[-1]}" if _errors else "")
    with Path(os.environ["COMPATIBILITY_REPORT"]).open("a") as file:
        print(json.dumps({"test": report.nodeid, "outcome": outcome, "reason": reason}), file=file)


# ------------------------------------------------------------------------------------------------- servers and runs


@contextlib.contextmanager
def serving(command: list[str], port: int, **environment: str) -> Iterator[None]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)
        try:
            until = time.monotonic() + 300
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models").read()
                    break
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"no server: {log.read().decode(errors='replace')[-3000:]}")
                time.sleep(0.5)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()


def names(tests: Path | None, model: Path) -> list[str]:
    """Return the names of models in the tests; all of them are the one that is served."""
    found = {"default", "claude-3-7-sonnet-latest", str(model)}
    for folder in VLLM_TESTS if tests is not None else ():
        assert tests is not None
        place = tests / "tests/entrypoints" / folder
        for file in [place] if place.is_file() else place.rglob("*.py"):
            found |= set(MODEL_NAME.findall(file.read_text()))
    return sorted(found)


def run_tests(given: argparse.Namespace, wanted: list[str], port: int, made: Path) -> dict[str, dict[str, str]]:
    """Run pytest in ``--python`` against the server at ``port``; return outcome and reason by test."""
    report = made / f"report-{port}.jsonl"
    folder = given.tests if given.suite == "vllm" else made
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*given.path, str(Path(__file__).parent), str(folder)]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COMPATIBILITY_SUITE": given.suite,
        "COMPATIBILITY_MODEL": str(given.model),
        "COMPATIBILITY_PORT": str(port),
        "COMPATIBILITY_REPORT": str(report),
    }
    plugins = ["-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", Path(__file__).stem]
    options = ["-q", "--tb=short", "--continue-on-collection-errors", "-o", "addopts=", "-o", "asyncio_mode=auto"]
    last = ["--models", "hermes"] if any("tool_use" in each for each in wanted) else []  # takes all that follows
    command = [str(given.python), "-m", "pytest", *plugins, *options, *wanted, *last]
    with (made / "pytest.log").open("ab") as log:
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=False)
    if not report.exists():
        raise SystemExit(f"no test was run: {(made / 'pytest.log').read_text()[-3000:]}")
    return {row.pop("test"): row for row in map(json.loads, report.read_text().splitlines())}


def sglang_module(model: Path, port: int) -> str:
    """Return the file of tests that gives SGLang's mixins an address."""
    lines = ["import unittest, openai"]
    for kit, mixin in SGLANG_KITS.items():
        address = f"http://127.0.0.1:{port}"
        lines += [
            f"from sglang.test.kits.{kit} import {mixin}",
            f"class Test_{kit}({mixin}, unittest.TestCase):",
            f"    model, base_url, api_key, process = {str(model)!r}, {address!r}, 'key', None",
            f"    client = openai.Client(api_key='key', base_url='{address}/v1')",
        ]
    return "\n".join([*lines, ""])


def free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("suite", choices=("vllm", "sglang"))
    parser.add_argument("--tests", type=Path, help="folder of vLLM's source")
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--path", action="append", default=[])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--engine-python")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.suite == "vllm" and given.tests is None:
        parser.error("vLLM's tests are not in its package: --tests FOLDER of its source")
    aliases, port = names(given.tests, given.model), free_port()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        if given.suite == "sglang":
            (made / "test_kits.py").write_text(sglang_module(given.model, port))
            wanted = ["test_kits.py"]
        else:
            wanted = given.only or [os.path.normpath(f"tests/entrypoints/{each}") for each in VLLM_TESTS]
        serve = [sys.executable, "-m", "asyncrl", "serve", str(given.model), "--port", str(port)]
        serve += ["--engine", given.engine, *(f"--model-name={each}" for each in aliases)]
        serve += ["--engine-python", given.engine_python] if given.engine_python else []
        with serving(serve, port, OMP_NUM_THREADS="1"):
            rows = run_tests(given, wanted, port, made)
    counts = Counter(row["outcome"] for row in rows.values())
    if given.json:
        print(json.dumps({"suite": given.suite, "engine": given.engine, "counts": counts, "tests": rows}, indent=1))
        return 0
    for test, row in rows.items():
        if row["outcome"] != "passed":
            print(f"{row['outcome']:8} {test}: {row['reason']}")
    print(f"{given.suite}'s tests, {given.engine}: {dict(counts)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
