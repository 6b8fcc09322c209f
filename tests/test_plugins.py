"""Parts are loaded by name."""

import sys
import types
from importlib.metadata import EntryPoint

import pytest

from asyncrl import plugins
from asyncrl.errors import ConfigError
from asyncrl.plugins import load_part, part_names, part_path

GROUP = "asyncrl.rollout_engines"


@pytest.fixture
def installed(monkeypatch):
    """Declare these entry points in place of those of the installed packages."""

    def install(**values):
        entries = [EntryPoint(name, value, GROUP) for name, options in values.items() for value in options]
        monkeypatch.setattr(plugins, "entry_points", lambda *, group: entries if group == GROUP else [])

    return install


def test_our_own_parts_are_found_by_name():
    assert "transformers" in part_names(GROUP)
    assert "calculator" in part_names("asyncrl.environments")


def test_a_part_by_name_and_by_dotted_path(installed):
    installed(ordered=["collections:OrderedDict"])
    from collections import OrderedDict

    assert load_part(GROUP, "ordered") is OrderedDict
    assert load_part(GROUP, "collections:OrderedDict") is OrderedDict
    assert load_part(GROUP, "collections:OrderedDict.fromkeys")("a") == {"a": None}


def test_names_are_listed_without_importing_anything(installed):
    installed(zzz=["no.such:Thing"], aaa=["neither.this:One"])
    assert part_names(GROUP) == ("aaa", "zzz")
    assert part_path(GROUP, "zzz") == "no.such:Thing"
    assert part_path(GROUP, "some.module:Name") == "some.module:Name"
    assert part_names("another.package") == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "tranformers",
            "rollout.engine: no rollout engine named 'tranformers'; did you mean 'transformers'? Installed: ",
        ),
        ("collections:Counte", "collections has no 'Counte'; did you mean Counter?"),
        ("no_such_package.x:Y", "no package 'no_such_package' on the path"),
        ("asyncrl.no_such:Y", "check the module's name"),
        (":Y", "is no dotted path"),
        ("..x:Y", "is no dotted path"),
    ],
)
def test_a_part_that_cannot_be_loaded_raises_with_a_remedy(name, text):
    with pytest.raises(ConfigError) as caught:
        load_part(GROUP, name, path="rollout.engine")
    assert text in str(caught.value)
    assert caught.value.path == "rollout.engine"
    assert caught.value.remedy in str(caught.value)


def test_a_missing_dependency_is_named_with_the_command_that_installs_it(installed, monkeypatch, tmp_path):
    (tmp_path / "needs_wandb.py").write_text("import wandb\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    installed(mine=["needs_wandb:Engine"])
    with pytest.raises(ConfigError) as caught:
        load_part(GROUP, "mine")
    assert "needs_wandb" in str(caught.value)
    assert "-m pip install 'wandb>=" in caught.value.remedy
    assert isinstance(caught.value.__cause__, ImportError)


def test_two_packages_with_the_same_name(installed):
    installed(mine=["a.b:C", "d.e:F"])
    with pytest.raises(ConfigError, match=r"a\.b:C or d\.e:F"):
        load_part(GROUP, "mine")
    installed(mine=["collections:Counter", "collections:Counter"])  # one package seen twice
    assert load_part(GROUP, "mine").__name__ == "Counter"


def test_a_module_that_breaks_while_it_is_imported_is_named_with_its_line(monkeypatch, tmp_path):
    (tmp_path / "breaks.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"ZeroDivisionError in .*breaks.py:1 <module>: division by zero"):
        load_part(GROUP, "breaks:X")


def test_a_name_inside_a_namespace(monkeypatch):
    module = types.ModuleType("made_up")
    module.Outer = types.SimpleNamespace(Inner=int)
    monkeypatch.setitem(sys.modules, "made_up", module)
    assert load_part(GROUP, "made_up:Outer.Inner") is int
