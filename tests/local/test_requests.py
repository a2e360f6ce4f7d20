from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")  # `local` is an extra of its own

from loops_cookbook.local.errors import BadRequest
from loops_cookbook.local.requests import Limits, Row, SampleJob, check_job, check_rows

pytestmark = pytest.mark.torch

LIMITS = Limits(vocab_size=10, max_seq_len=4)
JOB = SampleJob([1, 2], n=1, max_tokens=2)
IDS = np.array([1, 2, 3], np.int32)


def policy_row(**changes: np.ndarray | None) -> Row:
    zeros = np.zeros(3, np.float32)
    return replace(Row(IDS, logprobs=zeros, advantages=zeros), **changes)


def test_options_come_back_with_their_defaults() -> None:
    assert check_rows([policy_row()], "ppo", None, LIMITS) == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 1.2,
        "temperature": 1.0,
    }
    skip = {"skip_token_normalization": True}
    assert check_rows([], "cross_entropy", skip, LIMITS) == skip


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(np.zeros(0, np.int32)), r"model_input has shape \(0,\)"),
        (Row(np.zeros(5, np.int32)), "5 tokens: the window is 4"),
        (Row(np.array([1, 10], np.int32)), "model_input has ids outside the vocabulary of 10"),
        (Row(np.array([1, -1], np.int32)), "model_input has ids outside the vocabulary of 10"),
        (Row(IDS, np.array([1, 2])), r"target_tokens has shape \(2,\): give \(3,\) or \(3, K\)"),
        (Row(IDS, np.array([1, 2, 10])), "target_tokens has ids outside"),
        (Row(IDS, np.array([1, 2, -1])), "target_tokens has ids outside"),
        (Row(IDS, weights=np.ones(2, np.float32)), r"weights has shape \(2,\)"),
        (Row(IDS, weights=np.array([0, np.nan, 1], np.float32)), "weights has a value .* finite"),
        (Row(IDS, weights=np.array([0, -1, 1], np.float32)), "set skip_token_normalization"),
    ],
)
def test_a_supervised_row_that_cannot_be_is_refused(row: Row, message: str) -> None:
    with pytest.raises(BadRequest, match=rf"datum 1: .*{message}"):
        check_rows([Row(IDS), row], "cross_entropy", None, LIMITS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": None}, "loss 'cispo' needs logprobs"),
        ({"advantages": None}, "loss 'cispo' needs advantages"),
        ({"advantages": np.ones(1, np.float32)}, r"advantages has shape \(1,\)"),
        ({"target_ids": np.ones((3, 2), np.int64)}, "takes one a position"),
        ({"advantages": np.array([0, np.inf, 0], np.float32)}, "advantages has a value"),
        (
            {
                "advantages": np.array([0, 1, 0], np.float32),
                "logprobs": np.array([0, np.nan, 0], np.float32),
            },
            "logprobs has a value",
        ),
    ],
)
def test_a_policy_row_that_cannot_be_is_refused(
    changes: dict[str, np.ndarray | None], message: str
) -> None:
    with pytest.raises(BadRequest, match=rf"datum 0: .*{message}"):
        check_rows([policy_row(**changes)], "cispo", None, LIMITS)


def test_what_is_not_trained_may_hold_anything() -> None:
    row = policy_row(
        logprobs=np.array([np.nan, 0, 0], np.float32), target_ids=np.array([-100, 2, 3])
    )
    check_rows([row], "cispo", None, LIMITS)


def test_negative_weights_are_taken_as_raw_sums() -> None:
    row = Row(IDS, weights=np.array([0, -1, 1], np.float32))
    check_rows([row], "cross_entropy", {"skip_token_normalization": True}, LIMITS)


def test_one_request_has_one_rank_and_k() -> None:
    one, two = Row(IDS), Row(IDS, np.ones((3, 2), np.int64))
    with pytest.raises(BadRequest, match=r"\('N', 2\) and \('N',\)"):
        check_rows([one, two], "cross_entropy", None, LIMITS)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(BadRequest, match="unknown loss 'dpo2'"):
        check_rows([], "dpo2", None, LIMITS)
    with pytest.raises(BadRequest, match="unknown option 'beta' of loss 'ppo'"):
        check_rows([], "ppo", {"beta": 1.0}, LIMITS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "prompt is empty"),
        ({"prompt_ids": [1, 1, 1, 1]}, "prompt has 4 tokens: with a window of 4"),
        ({"prompt_ids": [10]}, "prompt has ids outside the vocabulary of 10"),
        ({"prompt_ids": [-1]}, "prompt has ids outside"),
        ({"n": 0}, "n is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"stop": ("a", "")}, "stop holds an empty string"),
        ({"n": 5000}, "n is 5000: give 1 to 4096"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1: give 0"),
        ({"prompt_logprobs": 11}, "prompt_logprobs is 11"),
    ],
)
def test_a_job_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        check_job(replace(JOB, **changes), LIMITS)


def test_at_most_20_of_the_likeliest_tokens_are_told() -> None:
    limits = Limits(vocab_size=100, max_seq_len=4)
    check_job(replace(JOB, prompt_logprobs=20), limits)
    with pytest.raises(BadRequest, match=r"give 0 \(the prompt's own tokens\) to 20"):
        check_job(replace(JOB, prompt_logprobs=21), limits)


def test_what_memory_does_not_hold_is_refused_with_what_it_holds() -> None:
    limits = Limits(vocab_size=10, max_seq_len=100, most_tokens=20, most_scored=12)
    check_job(replace(JOB, max_tokens=18), limits)
    with pytest.raises(BadRequest, match="ask for at most 20 tokens together"):
        check_job(replace(JOB, max_tokens=19), limits)
    long = replace(JOB, prompt_ids=[1] * 13, max_tokens=1)
    check_job(long, limits)
    with pytest.raises(BadRequest, match=r"prompt_logprobs of 13 tokens do not fit .* 12 do"):
        check_job(replace(long, prompt_logprobs=0), limits)


def test_what_the_window_cuts_off_needs_no_memory() -> None:
    check_job(replace(JOB, max_tokens=1000), Limits(10, max_seq_len=20, most_tokens=20))


def test_a_job_that_leaves_room_for_one_token_is_taken() -> None:
    check_job(replace(JOB, prompt_ids=[9, 9, 9]), LIMITS)
