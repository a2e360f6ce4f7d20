from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from loops_cookbook.local.errors import NotFinite
from loops_cookbook.local.generate import Sampler
from loops_cookbook.local.model import Policy, load_policy
from loops_cookbook.local.requests import Completion, SampleJob
from loops_cookbook.local.text import load_decode

pytestmark = pytest.mark.torch

END = 2
NEVER = (0,)
"""Stop ids of a job that is to run to its limit: sampled so rarely that no test here does."""
JOB = SampleJob([1, 3, 4], n=1, max_tokens=8, stop_token_ids=NEVER, seed=5)


@pytest.fixture
def policy(model_dir: Path) -> Policy:
    policy = load_policy(model_dir, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=32)
    with torch.no_grad():
        policy.module.get_input_embeddings().weight[0] = 0.0
    return policy


def sampler(
    policy: Policy, model_dir: Path, *, seed: int = 0, memory_bytes: int | None = None
) -> Sampler:
    return Sampler(
        policy, load_decode(model_dir), max_seq_len=32, seed=seed, memory_bytes=memory_bytes
    )


@pytest.fixture
def plain(policy: Policy, model_dir: Path) -> Sampler:
    return sampler(policy, model_dir)


def only(sampler: Sampler, job: SampleJob) -> Completion:
    ((completion,),) = sampler.sample([job])
    return completion


def assert_same(one: Completion, other: Completion) -> None:
    assert (one.ids, one.stop, one.text) == (other.ids, other.stop, other.text)
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def whole_logits(policy: Policy, job: SampleJob, completion: Completion) -> torch.Tensor:
    """float32[T, V], of each completion token's place, without memory or batch."""
    ids = torch.tensor([job.prompt_ids + completion.ids])
    with torch.no_grad():
        logits = policy.module(input_ids=ids, use_cache=False).logits[0]
    return logits[len(job.prompt_ids) - 1 : -1]


def test_a_job_gets_n_completions(plain: Sampler) -> None:
    three, one = plain.sample([replace(JOB, n=3), JOB])
    assert (len(three), len(one)) == (3, 1)
    assert len({tuple(completion.ids) for completion in three}) == 3


def test_no_jobs_give_no_completions(plain: Sampler) -> None:
    assert plain.sample([]) == []


def test_the_limit_ends_a_completion(plain: Sampler) -> None:
    completion = only(plain, JOB)
    assert (len(completion.ids), completion.stop) == (8, "length")
    assert len(completion.logprobs) == 8


def test_the_window_ends_a_completion(plain: Sampler) -> None:
    completion = only(plain, replace(JOB, prompt_ids=[3] * 28, max_tokens=100))
    assert (len(completion.ids), completion.stop) == (4, "length")


def test_a_stop_token_ends_a_completion_and_stays_in_it(plain: Sampler) -> None:
    free = only(plain, JOB)
    token = free.ids[4]
    first = free.ids.index(token)
    stopped = only(plain, replace(JOB, stop_token_ids=(token,)))
    assert (stopped.ids, stopped.stop) == (free.ids[: first + 1], "stop")
    assert stopped.logprobs == pytest.approx(free.logprobs[: first + 1], abs=1e-5)


def test_a_stop_string_ends_a_completion_across_tokens(plain: Sampler, model_dir: Path) -> None:
    decode = load_decode(model_dir)
    free = only(plain, JOB)
    string = decode(free.ids[3:5])
    end = next(end for end in range(9) if string in decode(free.ids[:end]))
    stopped = only(plain, replace(JOB, stop=(string,)))
    assert (stopped.ids, stopped.stop) == (free.ids[:end], "stop")
    assert stopped.text.endswith(string)


def test_the_last_token_within_the_limit_may_be_a_stop(plain: Sampler) -> None:
    token = only(plain, JOB).ids[0]
    completion = only(plain, replace(JOB, max_tokens=1, stop_token_ids=(token,)))
    assert (completion.ids, completion.stop) == ([token], "stop")


def test_the_models_own_end_counts_only_where_a_job_gives_no_stop(
    policy: Policy, model_dir: Path
) -> None:
    free = only(sampler(policy, model_dir), JOB)
    policy.eos_ids = frozenset({free.ids[3]})
    plain = sampler(policy, model_dir)
    ended = only(plain, replace(JOB, stop_token_ids=()))
    assert (ended.ids, ended.stop) == (free.ids[: free.ids.index(free.ids[3]) + 1], "stop")
    assert only(plain, JOB).ids == free.ids
    assert only(plain, replace(JOB, stop_token_ids=(), stop=("<bos>",))).ids == free.ids


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_of_the_distribution_after_temperature(
    policy: Policy, plain: Sampler, temperature: float
) -> None:
    job = replace(JOB, temperature=temperature, top_p=0.9, top_k=20)
    completion = only(plain, job)
    logits = whole_logits(policy, job, completion) / temperature
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion.ids)[:, None])
    assert completion.logprobs == pytest.approx(expected[:, 0].tolist(), abs=1e-5)


def test_temperature_0_is_greedy_with_logprobs_at_temperature_1(
    policy: Policy, plain: Sampler
) -> None:
    job = replace(JOB, temperature=0.0)
    completion = only(plain, job)
    logprobs, ids = torch.log_softmax(whole_logits(policy, job, completion), -1).max(-1)
    assert completion.ids == ids.tolist()
    assert completion.logprobs == pytest.approx(logprobs.tolist(), abs=1e-5)


def test_top_k_1_is_greedy_too(plain: Sampler) -> None:
    greedy = only(plain, replace(JOB, temperature=0.0))
    assert only(plain, replace(JOB, top_k=1)).ids == greedy.ids


MIXED = [
    replace(JOB, n=3),
    replace(JOB, prompt_ids=[1, 9], temperature=0.6, seed=6, n=2),
    replace(JOB, prompt_ids=[1, 9], temperature=0.0, max_tokens=3),
    replace(JOB, prompt_ids=list(range(3, 20)), top_p=0.5, seed=7, max_tokens=10),
    replace(JOB, prompt_ids=[1, 3, 4], top_k=3, seed=8, stop=("a", "e", "i")),
    replace(JOB, prompt_ids=[30], seed=9, stop_token_ids=tuple(range(3, 16)), n=4),
]


def test_a_seeded_completion_is_the_same_in_any_company(plain: Sampler) -> None:
    together = plain.sample(MIXED)
    for job, completions in zip(MIXED, together, strict=True):
        (alone,) = plain.sample([job])
        for one, other in zip(completions, alone, strict=True):
            assert_same(one, other)


def test_a_seeded_completion_does_not_depend_on_how_many_are_asked_for(plain: Sampler) -> None:
    assert_same(only(plain, JOB), plain.sample([replace(JOB, n=5)])[0][0])


def test_a_batch_is_split_by_memory_without_a_trace(policy: Policy, model_dir: Path) -> None:
    whole = sampler(policy, model_dir).sample(MIXED)
    row = 256 * 32 + 16 * policy.vocab_size
    parts = sampler(policy, model_dir, memory_bytes=3 * row).sample(MIXED)
    for one, other in zip(chain(*whole), chain(*parts), strict=True):
        assert_same(one, other)


def test_a_row_that_exceeds_the_memory_goes_alone(policy: Policy, model_dir: Path) -> None:
    job = replace(JOB, n=2, max_tokens=2)
    (tight,) = sampler(policy, model_dir, memory_bytes=1).sample([job])
    (wide,) = sampler(policy, model_dir).sample([job])
    for one, other in zip(tight, wide, strict=True):
        assert_same(one, other)


def test_a_batch_holds_as_many_rows_as_fit(policy: Policy, model_dir: Path) -> None:
    sizes: list[tuple[int, int]] = []

    def note(_: object, __: object, kwargs: dict[str, torch.Tensor]) -> None:
        sizes.append(tuple(kwargs["input_ids"].shape))

    policy.module.register_forward_pre_hook(note, with_kwargs=True)
    row = (3 + 2) * 256 + 16 * policy.vocab_size
    job = replace(JOB, n=7, max_tokens=2)
    sampler(policy, model_dir, memory_bytes=3 * row).sample([job])
    assert sizes == [(1, 3), (3, 1), (1, 3), (3, 1), (1, 3), (1, 1)]


def test_a_prompt_is_read_once_for_all_its_completions(policy: Policy, model_dir: Path) -> None:
    read: list[torch.Tensor] = []

    def note(_: object, __: object, kwargs: dict[str, torch.Tensor]) -> None:
        read.append(kwargs["input_ids"])

    policy.module.register_forward_pre_hook(note, with_kwargs=True)
    jobs = [replace(JOB, n=4), replace(JOB, n=2, seed=1), replace(JOB, prompt_ids=[1, 5, 6])]
    sampler(policy, model_dir).sample(jobs)
    assert read[0].tolist() == [[1, 3, 4], [1, 5, 6]]
    assert read[1].shape == (7, 1)


def test_ended_rows_are_dropped(policy: Policy, model_dir: Path) -> None:
    rows: list[int] = []

    def note(_: object, __: object, kwargs: dict[str, torch.Tensor]) -> None:
        rows.append(len(kwargs["input_ids"]))

    policy.module.register_forward_pre_hook(note, with_kwargs=True)
    jobs = [replace(JOB, n=4, max_tokens=2), replace(JOB, n=4, max_tokens=4)]
    sampler(policy, model_dir).sample(jobs)
    assert rows == [1, 8, 4, 4]


def test_unseeded_jobs_follow_the_samplers_seed(policy: Policy, model_dir: Path) -> None:
    job = replace(JOB, seed=None)
    one = sampler(policy, model_dir, seed=1)
    drawn = [only(one, job).ids, only(one, job).ids]
    again = sampler(policy, model_dir, seed=1)
    assert [only(again, job).ids, only(again, job).ids] == drawn
    assert drawn[0] != drawn[1]
    assert only(sampler(policy, model_dir, seed=2), job).ids != drawn[0]


def test_completions_follow_the_models_distribution(policy: Policy, plain: Sampler) -> None:
    job = replace(JOB, n=3000, max_tokens=1)
    (completions,) = plain.sample([job])
    seen = np.bincount([c.ids[0] for c in completions], minlength=41) / 3000
    expected = torch.softmax(whole_logits(policy, job, completions[0])[0], -1)
    assert np.abs(seen - expected.numpy()).max() < 0.03


def test_weights_that_ran_away_are_told(policy: Policy, model_dir: Path) -> None:
    with torch.no_grad():
        policy.module.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(NotFinite, match="a sampled token has logprob nan"):
        only(sampler(policy, model_dir), JOB)
