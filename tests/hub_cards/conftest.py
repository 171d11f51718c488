"""Finished run folders to publish."""

import pytest

from tests.hub_cards.test_cards import make_rows, write


@pytest.fixture
def make_run(tmp_path):
    """Return a function that makes a finished run folder; another seed makes other rows."""

    def make(name="run", count=40, seed=0, **identity):
        folder = tmp_path / name
        pairs, ledger = make_rows(count, seed=seed)
        write(folder, pairs, ledger, **{"seed": seed, **identity})
        return folder

    return make
