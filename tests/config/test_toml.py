"""Writing TOML is undone by reading it."""

import datetime as dt
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.toml import table_to_toml, value_from_toml, value_to_toml

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.one_of(
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False),
    texts,
    st.dates(),
    st.datetimes(),
    st.times(),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(texts, values, max_size=5))
def test_what_is_written_reads_back_equal(table):
    assert tomllib.loads(table_to_toml(table)) == table


def test_the_layout():
    table = {"b": {"x": 1, "deep": {"y": [1.0, "two"]}}, "a": True, "empty": {}}
    assert table_to_toml(table) == 'a = true\n\n[b]\nx = 1\n\n[b.deep]\ny = [1.0, "two"]\n\n[empty]\n'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-06, "1e-06"),
        (1.0, "1.0"),
        (np.float64(0.5), "0.5"),
        (float("-inf"), "-inf"),
        ('a"\n\x00', '"a\\"\\n\\u0000"'),
        (Path("runs"), '"runs"'),
        (dt.date(2026, 1, 2), "2026-01-02"),
        ({"a b": [True]}, '{"a b" = [true]}'),
    ],
)
def test_single_values(value, text):
    assert value_to_toml(value) == text


def test_not_a_number_survives():
    assert math.isnan(value_from_toml(value_to_toml(float("nan"))))


def test_there_is_no_form_for_nothing():
    with pytest.raises(TypeError, match="NoneType"):
        table_to_toml({"a": None})
