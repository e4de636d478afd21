"""The fixtures that every test relies on."""

from __future__ import annotations

import pytest

from tests.fixtures import clients_closed
from unmask.generation.remote.http import HttpClient


def test_a_test_that_fails_leaves_no_connection_open():
    opened = []
    with pytest.raises(ZeroDivisionError), clients_closed():
        opened.append(HttpClient("http://127.0.0.1:9", "a server", timeout=1, patience=0))
        raise ZeroDivisionError
    assert opened[0].is_closed
