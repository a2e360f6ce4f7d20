"""Try the Episode without a model: `python -m pytest` in this folder."""

import asyncio

import pytest
from episode import AnswerEpisode

from loops_cookbook.testing import attempt

TASK = {"name": "t", "instruction": "orders: paid, unpaid. how many are paid?", "answer": "1"}


@pytest.mark.parametrize(
    ("reply", "reward"), [("1", 1.0), (" 1\n", 1.0), ("2", 0.0), ("1 or 2", 0.0), ("", 0.0)]
)
def test_the_right_answer_alone_is_paid(reply: str, reward: float) -> None:
    tried = asyncio.run(attempt(AnswerEpisode, TASK, replies=[reply]))
    assert tried.reward == reward


def test_the_model_reads_the_question_and_not_the_answer() -> None:
    tried = asyncio.run(attempt(AnswerEpisode, TASK | {"answer": "42"}, replies=["2"]))
    (prompt,) = tried.prompts
    assert TASK["instruction"] in prompt
    assert "42" not in prompt
