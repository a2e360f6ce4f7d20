from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

import torch
from tests.local.sampling.builders import HYBRIDS, draft, made_policy, noting, whole

from loops_cookbook.local.model import Policy
from loops_cookbook.local.sampling.context import Context
from loops_cookbook.local.sampling.drafts import Draft

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_gradients")]

PROMPTS = [(3, 4, 5, 6, 7), (8,), (9, 10, 11)]
NEXT = [12, 13, 14]


@pytest.fixture
def no_gradients() -> object:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=["Llama", *HYBRIDS])
def policy(request: pytest.FixtureRequest) -> Policy:
    return made_policy(request.param, **HYBRIDS.get(request.param, {}))


def begun(policy: Policy, prompts: Sequence[tuple[int, ...]]) -> tuple[Context, list[Draft]]:
    """A row for each prompt."""
    context = Context(policy)
    logits = context.read(prompts)
    for its, prompt in zip(logits, prompts, strict=True):
        assert torch.allclose(its, whole(policy, prompt)[-1], atol=1e-4)
    drafts = [draft(prompt) for prompt in prompts]
    context.join([[some] for some in drafts])
    return context, drafts


@pytest.mark.parametrize("prompts", [PROMPTS, [(3, 4), (5, 6), (7, 8)]], ids=["padded", "even"])
def test_rows_go_on_as_if_each_were_alone(policy: Policy, prompts: list[tuple[int, ...]]) -> None:
    context, _ = begun(policy, prompts)
    once = context.extend(torch.tensor(NEXT))
    twice = context.extend(torch.tensor(NEXT))
    for row, (prompt, token) in enumerate(zip(prompts, NEXT, strict=True)):
        assert torch.allclose(once[row], whole(policy, (*prompt, token))[-1], atol=1e-4)
        assert torch.allclose(twice[row], whole(policy, (*prompt, token, token))[-1], atol=1e-4)


def test_rows_of_one_prompt_share_what_was_read_of_it(policy: Policy) -> None:
    context = Context(policy)
    context.read(PROMPTS)
    drafts = [[draft(PROMPTS[0]) for _ in range(2)], [], [draft(PROMPTS[2])]]
    context.join(drafts)
    assert context.drafts == [*drafts[0], *drafts[2]]
    logits = context.extend(torch.tensor([12, 13, 14]))
    texts = [(*PROMPTS[0], 12), (*PROMPTS[0], 13), (*PROMPTS[2], 14)]
    for its, text in zip(logits, texts, strict=True):
        assert torch.allclose(its, whole(policy, text)[-1], atol=1e-4)


def test_rows_that_end_leave_the_others_as_they_are(policy: Policy) -> None:
    prompts = [*PROMPTS, (20, 21), (22,)]
    context, drafts = begun(policy, prompts)
    texts = dict(zip(drafts, prompts, strict=True))
    widths: list[int] = []
    for ended in (set[Draft](), {drafts[1]}, {drafts[0], drafts[4]}):
        context.drop(ended)
        tokens = list(range(15, 15 + len(context.drafts)))
        with noting(policy) as passes:
            logits = context.extend(torch.tensor(tokens))
        widths.append(len(passes[0]))
        for its, some, token in zip(logits, context.drafts, tokens, strict=True):
            texts[some] = (*texts[some], token)
            assert torch.allclose(its, whole(policy, texts[some])[-1], atol=1e-4)
    # One of five is carried along; with two more gone it pays to drop all three.
    assert widths == [5, 5, 2]


def test_a_batch_in_which_all_ended_at_once_is_empty(policy: Policy) -> None:
    context = Context(policy)
    context.read(PROMPTS)
    context.join([[], [], []])
    assert context.drafts == []


def test_an_ended_row_does_not_leave_the_models_window() -> None:
    policy = made_policy("GPT2", n_embd=32, n_layer=1, n_head=4, n_positions=6)
    context, drafts = begun(policy, [(3, 4, 5, 6, 7), *((8 + k,) for k in range(4))])
    context.drop({drafts[0]})
    for _ in range(3):
        context.extend(torch.tensor([1, 2, 3, 4]))
