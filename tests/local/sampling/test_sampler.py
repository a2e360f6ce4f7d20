from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from tests.local.sampling.builders import HYBRIDS, made_policy, noting, whole

from loops_cookbook.local.errors import NotFinite
from loops_cookbook.local.model import Policy, load_policy
from loops_cookbook.local.requests import Completion, Sampled, SampleJob, Weights
from loops_cookbook.local.sampling.room import columns_of, stem_columns_of
from loops_cookbook.local.sampling.rows import WORTH_HOLDING
from loops_cookbook.local.sampling.sampler import Sampler
from loops_cookbook.local.sampling.tickets import Ticket
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


def sampler(policy: Policy, model_dir: Path, **changes: object) -> Sampler:
    settings: dict[str, object] = {"max_seq_len": 32, "seed": 0}
    return Sampler(policy, load_decode(model_dir), **settings | changes)


@pytest.fixture
def plain(policy: Policy, model_dir: Path) -> Sampler:
    return sampler(policy, model_dir)


def sample(sampler: Sampler, jobs: Sequence[SampleJob]) -> list[list[Completion]]:
    return [sampled.completions for sampled in sampler.sample(jobs)]


def only(sampler: Sampler, job: SampleJob) -> Completion:
    (sampled,) = sampler.sample([job])
    (completion,) = sampled.completions
    return completion


def run(sampler: Sampler, arrivals: Sequence[Sequence[SampleJob]]) -> list[list[Completion]]:
    """What jobs come to that arrive some before each step, in the order of arrival."""
    tickets: list[Ticket] = []
    outcomes: dict[Ticket, list[Completion]] = {}
    waiting = list(arrivals)
    while waiting or not sampler.is_idle:
        tickets += [sampler.add(job) for job in (waiting.pop(0) if waiting else ())]
        for ticket, outcome in sampler.step():
            assert isinstance(outcome, Sampled)
            outcomes[ticket] = outcome.completions
    return [outcomes[ticket] for ticket in tickets]


def assert_same(one: Completion, other: Completion) -> None:
    assert (one.ids, one.stop, one.text) == (other.ids, other.stop, other.text)
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def assert_all_same(one: list[list[Completion]], other: list[list[Completion]]) -> None:
    for completion, same in zip(chain(*one), chain(*other), strict=True):
        assert_same(completion, same)


def whole_logits(policy: Policy, job: SampleJob, completion: Completion) -> torch.Tensor:
    """float32[T, V], of each completion token's place, without memory or batch."""
    return whole(policy, job.prompt_ids + completion.ids)[len(job.prompt_ids) - 1 : -1]


def test_a_job_gets_n_completions(plain: Sampler) -> None:
    three, one = sample(plain, [replace(JOB, n=3), JOB])
    assert (len(three), len(one)) == (3, 1)
    assert len({tuple(completion.ids) for completion in three}) == 3


def test_no_jobs_give_no_completions(plain: Sampler) -> None:
    assert plain.sample([]) == []
    assert plain.is_idle


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
    together = sample(plain, MIXED)
    alone = [sample(plain, [job])[0] for job in MIXED]
    assert_all_same(together, alone)


def test_a_seeded_completion_does_not_depend_on_how_many_are_asked_for(plain: Sampler) -> None:
    assert_same(only(plain, JOB), sample(plain, [replace(JOB, n=5)])[0][0])


@pytest.mark.parametrize("kind", ["Llama", *HYBRIDS])
def test_a_seeded_completion_is_the_same_whenever_it_comes(kind: str, model_dir: Path) -> None:
    policy = made_policy(kind, **HYBRIDS.get(kind, {}))
    alone = [sample(sampler(policy, model_dir), [job])[0] for job in MIXED]
    arrivals = [MIXED[:2], [], MIXED[2:3], MIXED[3:5], [], [], MIXED[5:]]
    assert_all_same(run(sampler(policy, model_dir), arrivals), alone)


def test_jobs_join_those_under_way_at_the_next_step(policy: Policy, plain: Sampler) -> None:
    plain.add(replace(JOB, n=2))
    plain.step()
    plain.add(replace(JOB, prompt_ids=[9, 8]))
    with noting(policy) as passes:
        plain.step()
    assert [len(lines) for lines in passes] == [1, 3]


def test_a_completion_that_ends_makes_room_for_one_that_waits(
    policy: Policy, model_dir: Path
) -> None:
    jobs = [replace(JOB, n=1, max_tokens=length, seed=length) for length in (2, 6, 4, 3)]
    expected = [sample(sampler(policy, model_dir), [job])[0] for job in jobs]
    row = columns_of(3 + 6) * 256 + 16 * policy.vocab_size
    tight = sampler(policy, model_dir, memory_bytes=2 * 2 * row)
    with noting(policy) as passes:
        assert_all_same(sample(tight, jobs), expected)
    decoded = [len(lines) for lines in passes if len(lines[0]) == 1]
    assert max(decoded) == 2
    assert decoded.count(2) >= 4


def test_a_job_larger_than_memory_is_sampled_part_by_part(policy: Policy, model_dir: Path) -> None:
    job = replace(JOB, n=7, max_tokens=3)
    expected = sample(sampler(policy, model_dir), [job])
    row = columns_of(3) * 256 + 16 * policy.vocab_size
    room = stem_columns_of(3) * 256 + 3 * row
    tight = sampler(policy, model_dir, memory_bytes=2 * room)
    with noting(policy) as passes:
        assert_all_same(sample(tight, [job]), expected)
    assert max(len(lines) for lines in passes) == 3


def test_a_job_that_memory_cannot_hold_is_sampled_all_the_same(
    policy: Policy, model_dir: Path
) -> None:
    job = replace(JOB, n=2, max_tokens=2)
    tight = sample(sampler(policy, model_dir, memory_bytes=1), [job])
    assert_all_same(tight, sample(sampler(policy, model_dir), [job]))


class TestPrompts:
    LONG = (3, 9, 27, 4, 12, 36, 31, 16, 7, 21) * 4

    def test_a_prompt_is_read_once_for_all_its_completions(
        self, policy: Policy, plain: Sampler
    ) -> None:
        jobs = [replace(JOB, n=4), replace(JOB, n=2, seed=1), replace(JOB, prompt_ids=[1, 5, 6])]
        with noting(policy) as passes:
            plain.sample(jobs)
        assert passes[0] == [[1, 3, 4], [1, 5, 6]]
        assert [len(lines) for lines in passes[1:]] == [7] * 7

    def test_a_prompt_is_read_once_for_all_jobs_of_one_version(
        self, policy: Policy, plain: Sampler
    ) -> None:
        first = only(plain, JOB)
        with noting(policy) as passes:
            assert_same(only(plain, JOB), first)
        assert passes[0] == [[4]]
        plain.forget("live")
        with noting(policy) as passes:
            assert_same(only(plain, JOB), first)
        assert passes[0] == [[1, 3, 4]]

    def test_the_next_turn_goes_on_from_the_one_before(
        self, policy: Policy, model_dir: Path
    ) -> None:
        its = sampler(policy, model_dir, max_seq_len=64)
        spoken = only(its, replace(JOB, max_tokens=WORTH_HOLDING + 1))
        turn = [*JOB.prompt_ids, *spoken.ids, 8, 9]
        with noting(policy) as passes:
            again = only(its, replace(JOB, prompt_ids=turn))
        assert passes[0] == [turn[-3:]]
        assert_same(
            again, only(sampler(policy, model_dir, max_seq_len=64), replace(JOB, prompt_ids=turn))
        )

    def test_a_long_beginning_is_read_once_for_all_prompts_that_share_it(
        self, policy: Policy, model_dir: Path
    ) -> None:
        its = sampler(policy, model_dir, max_seq_len=64)
        jobs = [replace(JOB, prompt_ids=[*self.LONG, last]) for last in (5, 6, 7)]
        with noting(policy) as passes:
            together = sample(its, jobs)
        assert [[len(line) for line in lines] for lines in passes[:2]] == [[41], [1, 1]]
        alone = [sample(sampler(policy, model_dir, max_seq_len=64), [job])[0] for job in jobs]
        assert_all_same(together, alone)

    @pytest.mark.parametrize("kind", HYBRIDS)
    def test_a_model_that_forgets_tokens_reads_each_prompt_anew(
        self, kind: str, model_dir: Path
    ) -> None:
        policy = made_policy(kind, **HYBRIDS[kind])
        its = sampler(policy, model_dir, max_seq_len=64)
        for _ in range(2):
            with noting(policy) as passes:
                its.sample([replace(JOB, n=2)])
            assert passes[0] == [[1, 3, 4]]


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Next"])
def test_scores_of_the_prompt_come_with_the_completions(kind: str, model_dir: Path) -> None:
    policy = made_policy(kind, **HYBRIDS.get(kind, {}))
    job = replace(JOB, prompt_ids=[1, 3, 4, 9], n=2, prompt_logprobs=1, temperature=0.5)
    plain_job = replace(job, prompt_logprobs=None)
    scored, plain = sampler(policy, model_dir).sample([job, plain_job])
    assert plain.prompt_scores is None
    assert_all_same([scored.completions], [plain.completions])
    assert scored.prompt_scores is not None
    logprobs = whole(policy, job.prompt_ids).log_softmax(-1)
    pairs = zip(scored.prompt_scores[1:], [3, 4, 9], strict=True)
    own = [told[token].logprob for told, token in pairs if told]
    assert own == pytest.approx([float(logprobs[k, t]) for k, t in enumerate([3, 4, 9])], abs=1e-4)


def test_a_scored_prompt_is_read_once(policy: Policy, plain: Sampler) -> None:
    with noting(policy) as passes:
        plain.sample([replace(JOB, prompt_logprobs=0, max_tokens=1, temperature=0.0)])
    assert passes == [[[1, 3, 4]], [[4]]]


class TestAlone:
    def test_what_a_job_comes_to_depends_on_nothing_else_to_the_last_bit(
        self, policy: Policy, model_dir: Path
    ) -> None:
        alone = [sample(sampler(policy, model_dir, is_alone=True), [job])[0] for job in MIXED]
        its = sampler(policy, model_dir, is_alone=True)
        arrivals = [MIXED[3:], [], MIXED[:2], [MIXED[0]], [], MIXED[2:3]]
        order = [3, 4, 5, 0, 1, 0, 2]
        assert run(its, arrivals) == [alone[place] for place in order]

    def test_no_two_jobs_are_ever_in_one_batch(self, policy: Policy, model_dir: Path) -> None:
        its = sampler(policy, model_dir, is_alone=True)
        with noting(policy) as passes:
            its.sample([replace(JOB, max_tokens=2), replace(JOB, n=2, max_tokens=2)])
        assert [len(lines) for lines in passes] == [1, 1, 1, 2]
        assert passes[2] == [[1, 3, 4]]


class TestWeights:
    def test_jobs_of_other_weights_take_turns_under_them(
        self, policy: Policy, model_dir: Path
    ) -> None:
        log: list[str] = []

        @contextmanager
        def serving(weights: Weights) -> Generator[None]:
            log.append(weights)
            yield

        its = sampler(policy, model_dir, serving=serving)
        jobs = [replace(JOB, weights=weights, max_tokens=3) for weights in ("live", "base")]
        with noting(policy) as passes:
            one, other = sample(its, jobs)
        assert log == ["live", "base"] * 2
        assert_all_same([one], [other])
        # What the one read is no beginning for the other.
        assert [lines for lines in passes if len(lines[0]) == 3] == [[[1, 3, 4]]] * 2

    def test_the_other_weights_prompts_are_not_forgotten(
        self, policy: Policy, plain: Sampler
    ) -> None:
        job = replace(JOB, weights="base")
        plain.sample([job])
        plain.forget("live")
        with noting(policy) as passes:
            plain.sample([job])
        assert passes[0] == [[4]]


class TestFaults:
    @contextmanager
    def failing(self, policy: Policy, token: int) -> Generator[list[int]]:
        """Passes fail that have a token in them; how many lines each of those had."""
        lines: list[int] = []

        def fail(_: object, __: object, given: dict[str, torch.Tensor]) -> None:
            if (given["input_ids"] == token).any():
                lines.append(len(given["input_ids"]))
                raise RuntimeError(f"no memory for {token}")

        hook = policy.module.register_forward_pre_hook(fail, with_kwargs=True)
        try:
            yield lines
        finally:
            hook.remove()

    @pytest.mark.parametrize("kind", ["Llama", "Mistral"])
    def test_a_failure_ends_the_job_that_makes_it_and_no_other(
        self, kind: str, model_dir: Path
    ) -> None:
        policy = made_policy(kind, **HYBRIDS.get(kind, {}))
        good = [replace(JOB, n=2), replace(JOB, prompt_ids=[9, 8], seed=3)]
        expected = sample(sampler(policy, model_dir), good)
        said = {token for completion in chain(*expected) for token in completion.ids}
        token = next(token for token in range(10, 41) if token not in said)
        its = sampler(policy, model_dir)
        with self.failing(policy, token) as lines:
            jobs = (good[0], replace(JOB, prompt_ids=[token]), good[1])
            tickets = [its.add(job) for job in jobs]
            outcomes: dict[Ticket, object] = {}
            while not its.is_idle:
                outcomes.update(its.step())
        assert lines == [3, 1]
        assert str(outcomes[tickets[1]]) == f"no memory for {token}"
        sampled = [outcomes[ticket] for ticket in (tickets[0], tickets[2])]
        assert_all_same([s.completions for s in sampled if isinstance(s, Sampled)], expected)

    def test_a_failure_to_put_the_weights_in_place_ends_all_that_need_them(
        self, policy: Policy, model_dir: Path
    ) -> None:
        @contextmanager
        def serving(weights: Weights) -> Generator[None]:
            if weights == "base":
                raise RuntimeError("no memory")
            yield

        its = sampler(policy, model_dir, serving=serving)
        live, base = its.add(JOB), its.add(replace(JOB, weights="base"))
        outcomes: dict[Ticket, object] = {}
        while not its.is_idle:
            outcomes.update(its.step())
        assert isinstance(outcomes[live], Sampled)
        assert isinstance(outcomes[base], RuntimeError)

    def test_a_prompt_that_cannot_be_scored_ends_its_job_alone(
        self, policy: Policy, model_dir: Path
    ) -> None:
        its = sampler(policy, model_dir)
        with self.failing(policy, 40):
            bad = its.add(replace(JOB, prompt_ids=[40], prompt_logprobs=0))
            good = its.add(JOB)
            outcomes: dict[Ticket, object] = {}
            while not its.is_idle:
                outcomes.update(its.step())
        assert isinstance(outcomes[bad], RuntimeError)
        assert isinstance(outcomes[good], Sampled)

    def test_weights_that_ran_away_are_told(self, policy: Policy, model_dir: Path) -> None:
        its = sampler(policy, model_dir)
        with torch.no_grad():
            policy.module.get_output_embeddings().weight.fill_(float("nan"))
        with pytest.raises(NotFinite, match="a sampled token has logprob nan"):
            its.sample([JOB])
        assert its.is_idle


def test_a_job_that_is_left_ends_without_a_word(policy: Policy, plain: Sampler) -> None:
    left, waiting, other = plain.add(replace(JOB, n=3)), plain.add(JOB), plain.add(JOB)
    waiting.leave()
    plain.step()
    left.leave()
    with noting(policy) as passes:
        told = dict[Ticket, object]()
        while not plain.is_idle:
            told.update(plain.step())
    assert [len(lines) for lines in passes] == [1] * 6
    assert list(told) == [other]


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
    (completions,) = sample(plain, [job])
    seen = np.bincount([c.ids[0] for c in completions], minlength=41) / 3000
    expected = torch.softmax(whole_logits(policy, job, completions[0])[0], -1)
    assert np.abs(seen - expected.numpy()).max() < 0.03
