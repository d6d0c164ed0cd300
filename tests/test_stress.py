"""Launches in a row: pytest -c tests/pytest.ini -m stress tests. Not part of the suite."""

import pytest
from launch import DDP


@pytest.mark.stress
@pytest.mark.parametrize("number", range(13))
@pytest.mark.parametrize("script", DDP)
def test_launches_end_well(launch, script, number):
    """Exit 0 and nothing on stderr but what torchrun itself prints, 13 times 4 scripts."""
    run = launch(script, 2, "--dataset", "synthetic", "-e", "1", "-b", "500").succeeded()
    assert run.own_err() == "", run.story()
    assert run.epochs()[0]["count"] == 2000
