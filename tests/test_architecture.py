"""Who may know whom. The tree is the architecture; this page says it once more, and checks it."""

import ast
import functools
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("asyncrl", "engines", "buffers")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "base", "manager"}
RAY_FILES = "asyncrl/single_controller/ray"
RAY_ELSEWHERE = {"asyncrl/cli/doctor.py", "asyncrl/compat/verl/controller.py", "engines/weights/object_store.py"}
"""Files outside the Ray backend that may import ray: the doctor checks that it imports, verl's interface returns Ray's
placement groups, and one weight transport is Ray's object store."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def imports(path: Path) -> set[str]:
    """Full names of all modules a file imports, also inside functions; relative ones made absolute."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            found.add(".".join(part for part in (origin, node.module) if part))
    return found


def top_level(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def test_there_is_something_to_check():
    assert {name_of(path).partition("/")[0] for path in SOURCES} == set(PACKAGES)


@pytest.mark.parametrize(
    ("package", "strangers"),
    [
        ("asyncrl", {"engines", "buffers"}),
        ("engines", {"buffers"}),
        ("buffers", {"engines"}),
    ],
)
def test_the_core_knows_no_part_and_no_part_another(package, strangers):
    wrong = {name_of(path): top_level(path) & strangers for path in SOURCES if name_of(path).startswith(f"{package}/")}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_nobody_imports_tests_examples_or_benchmarks():
    outside = {"tests", "examples", "benchmarks"}
    assert [name_of(path) for path in SOURCES if top_level(path) & outside] == []


def test_ray_stays_in_its_backend():
    users = {name_of(path) for path in SOURCES if "ray" in top_level(path)}
    assert {path for path in users if not path.startswith(RAY_FILES)} <= RAY_ELSEWHERE


def test_interfaces_and_errors_know_only_the_data():
    for name in ("interfaces", "errors"):
        ours = {module for module in imports(ROOT / "asyncrl" / f"{name}.py") if module.startswith("asyncrl")}
        assert ours <= {"asyncrl.data", "asyncrl.ledger", "asyncrl.mesh", "asyncrl.weights"}


def test_no_module_is_named_after_nothing():
    nameless = [
        name_of(path)
        for path in SOURCES
        if FORBIDDEN_NAMES & {part.strip("_") for part in path.relative_to(ROOT).with_suffix("").parts}
    ]
    assert nameless == []


def room(module: str) -> str:
    """The folder of a module of ``asyncrl`` (or the module itself, at the top), or the package."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "asyncrl" else parts[0]


def test_no_two_rooms_import_each_other():
    """Imports for annotations count: what cannot be read without the other is no room of its own."""
    between = {
        (room(".".join(path.relative_to(ROOT).with_suffix("").parts)), room(module))
        for path in SOURCES
        for module in imports(path)
        if module.split(".")[0] in PACKAGES and module != "asyncrl"
    }
    assert {(one, other) for one, other in between if one < other and (other, one) in between} == set()


def test_the_page_knows_runs_by_their_folders_alone():
    knows = {room(module) for path in SOURCES if "page" in path.parts for module in imports(path)} - {"asyncrl.page"}
    assert {each for each in knows if each.startswith("asyncrl.")} == {"asyncrl.errors", "asyncrl.telemetry"}
    known_by = {name_of(path) for path in SOURCES if any(each.startswith("asyncrl.page") for each in imports(path))}
    assert {each for each in known_by if not each.startswith("asyncrl/page/")} == {"asyncrl/cli/page.py"}


def test_tests_are_no_package():
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_the_one_of_this_tree(package):
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == (ROOT / package / "__init__.py").resolve()


def fresh(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def test_importing_asyncrl_is_light_and_quick():
    heavy = ("torch", "ray", "transformers", "vllm", "sglang", "numpy", "tensordict", "pydantic")
    code = (
        "import sys, time; begin = time.process_time(); import asyncrl\n"
        f"print(time.process_time() - begin, *[name for name in {heavy} if name in sys.modules])"
    )
    answers = [fresh(code).split() for _ in range(3)]
    assert [loaded for _, *loaded in answers] == [[], [], []]
    assert min(float(seconds) for seconds, *_ in answers) < 0.15


@pytest.mark.parametrize(
    "module", ["asyncrl.interfaces", "asyncrl.errors", "asyncrl.config", "asyncrl.plugins", "asyncrl.telemetry"]
)
def test_the_light_modules_stay_light(module):
    heavy = ("torch", "ray", "transformers", "vllm", "sglang", "matplotlib", "rich")
    assert fresh(f"import sys, {module}; print(*[name for name in {heavy} if name in sys.modules])") == ""


def test_the_options_of_training_engines_are_known_without_the_model_library():
    engines = "engines.training.fsdp_engine, engines.training.value_engine"
    assert fresh(f"import sys, {engines}; print('transformers' in sys.modules)") == "False"
