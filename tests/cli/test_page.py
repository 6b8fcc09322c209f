"""``asyncrl page``: how the browser learns the address."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from asyncrl.cli.page import _redirect

URL = "http://127.0.0.1:1/?token=secret"


def test_the_token_reaches_the_browser_in_a_file_of_this_user_alone():
    with _redirect(URL) as address:
        assert "secret" not in address
        file = Path(urlsplit(address).path)
        assert file.stat().st_mode & 0o777 == 0o600
        assert URL in file.read_text()
    assert not file.exists()
