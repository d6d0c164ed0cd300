"""A program that is converted trains as before: one process and two print the same numbers."""

import re

import pytest
from launch import REPO, run_forked_ranks


def run_language_model(name, processes, folder):
    """Returns (losses and perplexities, sampled texts) of all epochs."""
    path = REPO / "docs" / "examples" / name
    codes, out, err = run_forked_ranks(path, processes, folder, seconds=30)
    assert codes == [0] * max(processes, 1), err
    lines, texts = out.splitlines()[::2], out.splitlines()[1::2]
    assert len(lines) == len(texts) == 3, out
    numbers = [re.findall(r"(?:loss|perplexity) (\d+\.\d+) ", line) for line in lines]
    return [float(number) for pair in numbers for number in pair], texts


def test_language_model_trains_alike_in_one_process_and_in_two(tmp_path):
    """Its columns are shared out, its loss is a sum, and rank 0 samples in mid-training."""
    numbers, texts = run_language_model("char_lm.py", 0, tmp_path / "plain")
    of_two, texts_of_two = run_language_model("char_lm_ddp.py", 2, tmp_path / "ddp")
    assert len(numbers) == 6 and numbers[-1] < numbers[1] / 1.2  # It learns.
    assert of_two == pytest.approx(numbers, rel=5e-6)  # six digits
    assert texts_of_two == texts
