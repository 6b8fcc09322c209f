"""Files that cannot be read, and where in them the mistake is."""

import pytest

from asyncrl.config import load_config
from asyncrl.errors import ConfigError


def message(path):
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b'name = "x"\nsteps 3\n', ":2:7: not valid TOML"),
        (b"a = 1\na = 2\n", ":2:6: not valid TOML"),
        (b'name = "x"\nsteps = [1,\n', ":3: not valid TOML"),
        (b"a = 1\n\xff\n", ":2: byte 0xff is not UTF-8"),
        (b"a = " + b"[" * 100_000, "nested too deep"),
        (b"a." * 5_000 + b"a = 1", "nested too deep"),
        (b"a = " + b"9" * 10_000, "not valid TOML"),
    ],
)
def test_the_line_of_a_mistake_is_named(tmp_path, content, place):
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    text = message(file)
    assert text.startswith(str(file))
    assert place in text


def test_a_missing_file_names_its_neighbours(tmp_path):
    (tmp_path / "calculator.toml").touch()
    text = message(tmp_path / "calculater.toml")
    assert "no such file" in text
    assert "calculator.toml" in text


def test_a_folder_is_no_file(tmp_path):
    assert "cannot be read" in message(tmp_path)


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    file = tmp_path / "windows.toml"
    file.write_bytes(
        b'\xef\xbb\xbfname = "x"\r\nsteps = 1\r\n[model]\r\nsource = "scratch"\r\n[env]\r\nname = "calculator"\r\n'
    )
    assert load_config(file).steps == 1
