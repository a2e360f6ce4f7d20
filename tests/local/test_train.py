import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from loops_cookbook.learning import losses as reference
from loops_cookbook.local.errors import BadRequest, NotFinite
from loops_cookbook.local.model import Policy, copies, load_policy
from loops_cookbook.local.probe import Packing
from loops_cookbook.local.requests import AdamW, Limits, LossOutput, Row, check_rows
from loops_cookbook.local.train import Trainer

pytestmark = pytest.mark.torch

ADAM = AdamW(
    learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=1.0
)
POLICY = [name for name, loss in reference.LOSSES.items() if loss.kind == "policy"]
RAW = {"skip_token_normalization": True}


@pytest.fixture
def policy(model_dir: Path) -> Policy:
    policy = load_policy(model_dir, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=32)
    policy.reset(0, lora_alpha=16, seed=0)
    return policy


@pytest.fixture
def trainer(policy: Policy) -> Trainer:
    return Trainer(policy)


def supervised_rows(count: int = 4, seed: int = 0) -> list[Row]:
    """Rows of several lengths, half their weights 0."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for place in range(count):
        ids = rng.integers(3, 41, 4 + 2 * place)
        weights = rng.choice([0.0, 0.5, 1.0], len(ids) - 1).astype(np.float32)
        rows.append(Row(ids[:-1].astype(np.int32), ids[1:], weights))
    return rows


def policy_rows(count: int = 4, seed: int = 0) -> list[Row]:
    """Rows of several lengths, trained on their second half."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for row in supervised_rows(count, seed):
        length = len(row.input_ids)
        is_trained = np.arange(length) >= length // 2
        rows.append(
            Row(
                row.input_ids,
                row.target_ids,
                logprobs=np.where(is_trained, rng.normal(-4, 1, length), 0).astype(np.float32),
                advantages=np.where(is_trained, rng.normal(), 0).astype(np.float32),
            )
        )
    return rows


def group_rows(loss: str, groups: int = 2, size: int = 5) -> list[Row]:
    """Rows of some groups, each with a prompt of its own; two of each group are equal."""
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for _ in range(groups):
        prompt = rng.integers(3, 41, 9)
        for place in range(size):
            ids = np.append(prompt, rng.integers(3, 41, 2 + place))
            is_trained = np.arange(len(ids) - 1) >= len(prompt) - 1
            row = Row(ids[:-1].astype(np.int32), ids[1:])
            factors = (rng.normal(size=len(is_trained)) * is_trained).astype(np.float32)
            if loss == "cross_entropy":
                rows.append(replace(row, weights=np.abs(factors)))
            else:
                old = rng.normal(-6, 2, len(is_trained)).astype(np.float32)
                rows.append(replace(row, logprobs=old, advantages=factors))
        rows.append(rows[-1])
    return rows


def run(
    act: Callable[..., LossOutput],
    rows: list[Row],
    loss: str,
    config: dict[str, object] | None = None,
) -> LossOutput:
    return act(rows, loss, check_rows(rows, loss, config, Limits(41, 32)))


def gradients(policy: Policy) -> torch.Tensor:
    return torch.cat(
        [
            torch.zeros_like(p).ravel() if p.grad is None else p.grad.ravel().clone()
            for p in policy.trainable
        ]
    )


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for rounding, relative to the whole."""
    return float((one - other).norm()) < 1e-4 * float(other.norm())


def whole_logprobs(policy: Policy, row: Row, temperature: float = 1.0) -> np.ndarray:
    """float64[N], of a row's targets, by one plain pass."""
    with torch.no_grad():
        logits = policy.module(input_ids=torch.tensor(row.input_ids)[None].long()).logits[0]
    logprobs = torch.log_softmax(logits.double() / temperature, -1)
    return logprobs.gather(1, torch.tensor(row.target_ids)[:, None])[:, 0].numpy()


def test_this_model_is_packed(trainer: Trainer) -> None:
    """The tests below stand on it: most of them would pass on padded rows too."""
    described = trainer.description()
    assert described["packed_training"].startswith("on (largest difference ")
    assert described["activations"] == "kept"


def test_the_log_says_how_rows_are_computed(
    policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="loops_cookbook.local.train"):
        Trainer(policy, packing=Packing(False, "for a reason"))
    assert caplog.messages == ["packed training: off: for a reason", "activations: kept"]


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("loss", list(reference.LOSSES))
def test_packed_and_padded_rows_come_to_the_same(model_dir: Path, rank: int, loss: str) -> None:
    policy = load_policy(model_dir, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=32)
    policy.reset(rank, lora_alpha=16, seed=0)
    with torch.no_grad():
        for parameter in policy.trainable:  # a fresh adapter has gradients in half its tensors
            parameter.add_(torch.randn_like(parameter) * 0.02)
    rows, outputs, found = group_rows(loss), [], []
    for packing in (Packing(False, "padded"), None):
        trainer = Trainer(policy, packing=packing)
        outputs.append(run(trainer.forward_backward, rows, loss))
        found.append(gradients(policy))
        trainer.clear()
    padded, packed = outputs
    assert packed.loss == pytest.approx(padded.loss, rel=1e-4)
    assert packed.metrics == pytest.approx(padded.metrics, rel=1e-4)
    for one, other in zip(packed.logprobs, padded.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-4, nan_ok=True)
    assert same(found[1], found[0])


@pytest.mark.parametrize("loss", ["cispo", "cross_entropy"])
def test_equal_rows_count_as_often_as_they_are_sent(
    policy: Policy, trainer: Trainer, loss: str
) -> None:
    row = group_rows(loss)[0]
    once = run(trainer.forward_backward, [row], loss)
    expected = 3 * gradients(policy)
    trainer.clear()
    thrice = run(trainer.forward_backward, [row] * 3, loss)
    assert thrice.loss == pytest.approx(once.loss, rel=1e-5)
    assert same(gradients(policy), expected)


def test_equal_rows_may_differ_in_what_they_are_trained_towards(
    policy: Policy, trainer: Trainer
) -> None:
    row = group_rows("cross_entropy")[0]
    rows = [row, replace(row, target_ids=row.target_ids[::-1].copy())]
    output = run(trainer.forward, rows, "cross_entropy")
    for sent, logprobs in zip(rows, output.logprobs, strict=True):
        assert logprobs == pytest.approx(whole_logprobs(policy, sent), abs=1e-4)


@pytest.mark.parametrize("packing", [Packing(False, "padded"), Packing(True, "packed")])
def test_rows_too_long_to_be_kept_are_recomputed(policy: Policy, packing: Packing) -> None:
    rows = group_rows("ppo")
    whole = Trainer(policy, packing=packing)
    output = run(whole.forward_backward, rows, "ppo")
    expected = gradients(policy)
    whole.clear()
    # 10 tokens may be kept and 19 recomputed; the rows have up to 14.
    tight = Trainer(policy, packing=packing, memory_bytes=10 * 10752)
    assert tight.description()["activations"] == (
        "kept up to 10 tokens of a micro-batch, recomputed beyond"
    )
    reads: list[int] = []
    policy.module.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: reads.append(1))
    run(tight.forward, rows, "ppo")
    once = len(reads)
    assert run(tight.forward_backward, rows, "ppo").loss == pytest.approx(output.loss, rel=1e-5)
    assert len(reads) > 2 * once
    assert same(gradients(policy), expected)


@pytest.mark.parametrize("loss", POLICY)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_policy_losses_equal_the_reference(
    policy: Policy, trainer: Trainer, loss: str, temperature: float
) -> None:
    rows = policy_rows()
    output = run(trainer.forward_backward, rows, loss, {"temperature": temperature})
    function = getattr(reference, loss)
    expected = 0.0
    for row, logprobs in zip(rows, output.logprobs, strict=True):
        is_trained = row.advantages != 0
        whole = whole_logprobs(policy, row, temperature)
        assert logprobs[is_trained] == pytest.approx(whole[is_trained], abs=1e-4)
        assert not logprobs[~is_trained].any()
        expected += function(whole, row.logprobs, row.advantages).total
    assert output.loss == pytest.approx(expected / len(rows), rel=1e-4)


def test_cross_entropy_is_the_mean_over_rows_of_weighted_sums(
    policy: Policy, trainer: Trainer
) -> None:
    rows = supervised_rows()
    output = run(trainer.forward_backward, rows, "cross_entropy")
    expected = sum(-(row.weights * whole_logprobs(policy, row)).sum() for row in rows)
    assert output.loss == pytest.approx(expected / len(rows), rel=1e-5)
    for row, logprobs in zip(rows, output.logprobs, strict=True):
        assert np.isnan(logprobs).tolist() == (row.weights == 0).tolist()
    assert output.metrics == {}


def test_a_forward_pass_scores_every_target(policy: Policy, trainer: Trainer) -> None:
    (row,) = supervised_rows(1)
    row = replace(row, weights=np.zeros_like(row.weights))
    row.target_ids[1] = -100
    output = run(trainer.forward, [row], "cross_entropy", RAW)
    expected = whole_logprobs(policy, replace(row, target_ids=row.target_ids.clip(0)))
    expected[1] = np.nan
    assert output.logprobs[0] == pytest.approx(expected, abs=1e-4, nan_ok=True)
    assert output.loss == 0
    assert output.metrics == {"skip_token_normalization": 1.0}


def test_without_targets_each_position_predicts_the_next_token(trainer: Trainer) -> None:
    ids = np.array([3, 4, 5], np.int32)
    scored = run(trainer.forward, [Row(ids)], "cross_entropy").logprobs[0]
    explicit = run(trainer.forward, [Row(ids[:2], np.array([4, 5]))], "cross_entropy").logprobs[0]
    assert scored == pytest.approx([*explicit, 0.0], abs=1e-5)


def test_several_targets_at_a_position_add_up(trainer: Trainer) -> None:
    ids = np.array([3, 4], np.int32)
    targets = np.array([[5, 6], [7, -100]])
    weights = np.array([[0.25, 0.75], [1.0, 1.0]], np.float32)
    both = run(trainer.forward_backward, [Row(ids, targets, weights)], "cross_entropy")
    first = run(trainer.forward, [Row(ids, targets[:, 0], weights[:, 0])], "cross_entropy")
    second = run(trainer.forward, [Row(ids, targets[:, 1], weights[:, 1])], "cross_entropy")
    assert both.loss == pytest.approx(first.loss + second.loss)
    assert both.logprobs[0].shape == (2, 2)
    assert both.logprobs[0][:, 0] == pytest.approx(first.logprobs[0])
    assert math.isnan(both.logprobs[0][1, 1])


@pytest.mark.parametrize(
    ("loss", "rows"), [("cispo", policy_rows()), ("cross_entropy", supervised_rows())]
)
def test_gradients_add_up_over_calls(
    policy: Policy, trainer: Trainer, loss: str, rows: list[Row]
) -> None:
    run(trainer.forward_backward, rows, loss)
    together = gradients(policy)
    trainer.clear()
    assert not gradients(policy).any()
    run(trainer.forward_backward, rows[:1], loss)
    run(trainer.forward_backward, rows[1:], loss)
    assert torch.allclose(gradients(policy), together, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("memory_bytes", [1, 3 * 16 * 41, 10 * 10752])
def test_small_micro_batches_change_nothing(
    policy: Policy, trainer: Trainer, memory_bytes: int
) -> None:
    rows = policy_rows(6)
    whole = run(trainer.forward_backward, rows, "ppo")
    expected = gradients(policy)
    trainer.clear()
    parts = run(Trainer(policy, memory_bytes=memory_bytes).forward_backward, rows, "ppo")
    assert torch.allclose(gradients(policy), expected, atol=1e-4, rtol=1e-4)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.metrics == pytest.approx(whole.metrics, rel=1e-5)
    for one, other in zip(parts.logprobs, whole.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_forward_pass_leaves_gradients_as_they_are(policy: Policy, trainer: Trainer) -> None:
    run(trainer.forward_backward, policy_rows(), "cispo")
    before = gradients(policy)
    run(trainer.forward, policy_rows(), "ppo")
    run(trainer.forward, supervised_rows(), "cross_entropy")
    assert torch.equal(gradients(policy), before)


def test_a_forward_pass_gives_what_forward_backward_gives(trainer: Trainer) -> None:
    rows = policy_rows()
    dry = run(trainer.forward, rows, "ppo")
    wet = run(trainer.forward_backward, rows, "ppo")
    assert dry.loss == pytest.approx(wet.loss)
    assert dry.metrics == pytest.approx(wet.metrics)
    for one, other in zip(dry.logprobs, wet.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


def test_a_step_divides_cross_entropy_by_all_its_weights(policy: Policy, trainer: Trainer) -> None:
    rows = supervised_rows()
    run(trainer.forward_backward, rows[:3], "cross_entropy")
    run(trainer.forward_backward, rows[3:], "cross_entropy")
    total = sum(float(row.weights.sum()) for row in rows)
    expected = float(gradients(policy).norm()) / total
    assert trainer.optim_step(ADAM)["grad_norm"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("loss", "rows", "config"),
    [("cross_entropy", supervised_rows(), RAW), ("cispo", policy_rows(), None)],
)
def test_a_step_takes_raw_sums_as_they_are(
    policy: Policy, trainer: Trainer, loss: str, rows: list[Row], config: dict[str, object] | None
) -> None:
    run(trainer.forward_backward, rows, loss, config)
    expected = float(gradients(policy).norm())
    assert trainer.optim_step(ADAM)["grad_norm"] == pytest.approx(expected, rel=1e-4)


def test_a_step_is_adams_on_the_clipped_gradient(policy: Policy, trainer: Trainer) -> None:
    run(trainer.forward_backward, policy_rows(), "cispo")
    plain = [torch.nn.Parameter(value) for value in copies(policy.trainable)]
    for parameter, trained in zip(plain, policy.trainable, strict=True):
        parameter.grad = trained.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(plain, 0.5)
    torch.optim.AdamW(plain, 2e-2, (0.8, 0.9), 1e-6, 0.1, foreach=False).step()
    settings = AdamW(2e-2, 0.8, 0.9, 1e-6, 0.1, 0.5)
    metrics = trainer.optim_step(settings)
    assert metrics == {
        "grad_norm": pytest.approx(float(norm)),
        "grad_clipped": 1.0,
        "learning_rate": 2e-2,
    }
    for parameter, trained in zip(plain, policy.trainable, strict=True):
        assert torch.allclose(parameter, trained, atol=1e-6)


def test_a_clip_of_0_clips_nothing(policy: Policy, trainer: Trainer) -> None:
    run(trainer.forward_backward, policy_rows(), "cispo")
    assert trainer.optim_step(replace(ADAM, grad_clip_norm=0.0))["grad_clipped"] == 0.0


def test_a_step_without_gradients_is_refused(policy: Policy, trainer: Trainer) -> None:
    with pytest.raises(BadRequest, match="optim_step without gradients"):
        trainer.optim_step(ADAM)
    run(trainer.forward_backward, policy_rows(), "cispo")
    trainer.optim_step(ADAM)
    with pytest.raises(BadRequest, match="optim_step without gradients"):
        trainer.optim_step(ADAM)


def test_rows_without_advantage_make_the_step_of_a_zero_gradient(
    policy: Policy, trainer: Trainer
) -> None:
    flat = [replace(row, advantages=np.zeros_like(row.advantages)) for row in policy_rows()]
    before = copies(policy.trainable)
    output = run(trainer.forward_backward, flat, "cispo")
    assert (output.loss, output.metrics) == (0.0, {})
    assert trainer.optim_step(ADAM)["grad_norm"] == 0.0
    for one, other in zip(before, policy.trainable, strict=True):
        assert torch.equal(one, other)


def test_no_rows_give_nothing(trainer: Trainer) -> None:
    output = run(trainer.forward_backward, [], "cross_entropy", RAW)
    assert (output.loss, output.logprobs) == (0.0, [])
    assert output.metrics == {"skip_token_normalization": 1.0}


@pytest.mark.parametrize(
    ("loss", "rows", "config"),
    [("cispo", policy_rows, None), ("cross_entropy", supervised_rows, RAW)],
)
def test_raw_and_normalised_gradients_do_not_mix(
    trainer: Trainer, loss: str, rows: Callable[[], list[Row]], config: dict[str, object] | None
) -> None:
    """A step that was sent behind the refused request used to be taken on the other half."""
    run(trainer.forward_backward, supervised_rows(), "cross_entropy")
    with pytest.raises(BadRequest, match="would add raw gradients to normalised ones"):
        run(trainer.forward_backward, rows(), loss, config)
    with pytest.raises(BadRequest, match="without gradients"):
        trainer.optim_step(ADAM)


def test_a_gradient_that_is_not_finite_is_dropped(policy: Policy, trainer: Trainer) -> None:
    run(trainer.forward_backward, policy_rows(), "cispo")
    before = copies(policy.trainable)
    policy.trainable[0].grad[0, 0] = math.inf
    with pytest.raises(NotFinite, match=r"norm is (inf|nan): this step was not taken"):
        trainer.optim_step(ADAM)
    for one, other in zip(before, policy.trainable, strict=True):
        assert torch.equal(one, other)
    run(trainer.forward_backward, policy_rows(), "cispo")
    trainer.optim_step(ADAM)


def test_a_loss_that_is_not_finite_leaves_no_gradients(policy: Policy, trainer: Trainer) -> None:
    run(trainer.forward_backward, policy_rows(), "importance_sampling")
    far = [replace(row, logprobs=row.logprobs - 1000) for row in policy_rows()]
    with pytest.raises(NotFinite, match="importance_sampling came to"):
        run(trainer.forward_backward, far, "importance_sampling")
    assert not gradients(policy).any()
    with pytest.raises(BadRequest, match="optim_step without gradients"):
        trainer.optim_step(ADAM)


def test_metrics_tell_how_far_the_policy_has_moved(policy: Policy, trainer: Trainer) -> None:
    (row,) = policy_rows(1)
    is_trained = row.advantages != 0
    old = whole_logprobs(policy, row) - np.log(1.5)
    row = replace(
        row,
        logprobs=np.where(is_trained, old, 0).astype(np.float32),
        advantages=is_trained.astype(np.float32),
    )
    output = run(trainer.forward, [row], "ppo")
    assert output.metrics == pytest.approx({"ratio_mean": 1.5, "clip_fraction": 1.0}, rel=1e-4)
    far = replace(row, logprobs=row.logprobs - 2000)
    assert math.isfinite(run(trainer.forward, [far], "cispo").metrics["ratio_mean"])
    assert "clip_fraction" not in run(trainer.forward, [row], "importance_sampling").metrics
    masks = {"dppo_mask_high": 0.0}
    assert run(trainer.forward, [row], "dppo", masks).metrics["clip_fraction"] == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"learning_rate": math.nan}, "learning_rate is nan"),
        ({"beta1": 1.0}, r"beta1 is 1.0: give 0 or more, and below 1"),
        ({"eps": math.inf}, "eps is inf"),
        ({"grad_clip_norm": -1.0}, "grad_clip_norm is -1.0"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        replace(ADAM, **changes)
