"""Drive `loops serve` with the public client `baseten-loops`, as it is, through all that we serve.

    python .ci/real_client.py LOOPS [MODEL]

Run by a Python (3.12 or later) with `baseten-loops` and its shim `baseten-loops-tinker`; LOOPS is
the command of an environment with the embedded engine. The server is started here, on loopback, and
ended here. Each line printed says what held; the first that does not ends the script with status 1.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np

KEY = "conformance-key"
PROMPT = [3, 4, 5]
WAIT_SECONDS = 120


class Tensor:
    """As much of a torch tensor as the client's custom losses use; torch itself is not needed."""

    def __init__(self, values: object) -> None:
        self.values = np.asarray(values, np.float32)
        self.dtype = "torch.float32"
        self.grad: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def reshape(self, shape: object) -> "Tensor":
        return Tensor(self.values.reshape(shape))

    def tolist(self) -> list[object]:
        return self.values.tolist()

    def flatten(self) -> "Tensor":
        return Tensor(self.values.flatten())

    def detach(self) -> "Tensor":
        return self

    clone = detach

    def requires_grad_(self, _: bool) -> "Tensor":
        return self

    def __neg__(self) -> "Tensor":
        return Tensor(-self.values)


def stand_in_for_torch() -> types.ModuleType:
    """A module `torch` of a few lines."""
    torch = types.ModuleType("torch")
    names = ["float32", "float16", "bfloat16", "float64", "int32", "int64", "int8", "bool"]
    for name in names:
        kind = types.SimpleNamespace(is_floating_point="float" in name)
        setattr(torch, name, kind)
    torch.Tensor = Tensor
    torch.tensor = lambda data, dtype=None: Tensor(data)
    torch.nan_to_num = lambda tensor, nan: Tensor(np.nan_to_num(tensor.values, nan=nan))
    return torch


sys.modules.setdefault("torch", stand_in_for_torch())

from baseten import loops  # noqa: E402
from baseten.loops import models as wire  # noqa: E402
from baseten.loops import training_client  # noqa: E402
from baseten.loops.sampling_client import LocalDeployment, SamplingClient  # noqa: E402


@contextmanager
def served(command: str, model: str, folder: Path, *, key: str | None) -> Iterator[str]:
    """`loops serve` on a free port; its address."""
    asked = [command, "serve", model, "--port=0", "--max-seq-len=64", f"--checkpoints={folder}"]
    environ = dict(os.environ)
    if key is not None:
        asked.append("--api-key-env=CONFORMANCE_KEY")
        environ["CONFORMANCE_KEY"] = key
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            line = process.stdout.readline()
            if " on http" not in line:
                raise SystemExit(f"loops serve did not serve: {line!r}")
            yield line.split(" on ")[1].split(": ")[0]
        finally:
            process.terminate()
            process.wait(10)


def held(what: str) -> None:
    print(f"held: {what}", flush=True)


def require(truth: bool, what: str) -> None:
    if not truth:
        raise SystemExit(f"NOT HELD: {what}")


def near(one: list[float], other: list[float], tolerance: float = 1e-4) -> bool:
    return len(one) == len(other) and all(
        math.isclose(a, b, abs_tol=tolerance) for a, b in zip(one, other, strict=True)
    )


def datum(ids: list[int], **streams: list[float]) -> wire.Datum:
    """Ids and what stands at each of their targets."""
    length = len(ids) - 1
    inputs = {"target_tokens": wire.TensorData(data=ids[1:], dtype="int64", shape=[length])}
    for name, values in streams.items():
        inputs[name] = wire.TensorData(data=values, dtype="float32", shape=[length])
    return wire.Datum(model_input=wire.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def taught(sequences: list[wire.SampledSequence], rewards: list[float]) -> list[wire.Datum]:
    """Sampled sequences with their centred rewards."""
    mean = sum(rewards) / len(rewards)
    before = len(PROMPT) - 1
    return [
        datum(
            PROMPT + list(sequence.tokens),
            logprobs=[0.0] * before + list(sequence.logprobs),
            advantages=[0.0] * before + [reward - mean] * len(sequence.tokens),
        )
        for sequence, reward in zip(sequences, rewards, strict=True)
    ]


def adam(rate: float = 1e-2) -> wire.AdamParams:
    return wire.AdamParams(learning_rate=rate)


def refused(call: Callable[[], object], status: int) -> str:
    """The words of a refusal that must come at once."""
    began = time.monotonic()
    try:
        call()
    except httpx.HTTPStatusError as error:
        require(error.response.status_code == status, f"a refusal with {status}: {error}")
        require(time.monotonic() - began < 20, "a refusal at once")
        return str(error)
    raise SystemExit(f"NOT HELD: a refusal with {status}")


def through_the_control_plane(url: str, model: str) -> None:
    """Everything that a client which was given one address can do."""
    service = loops.ServiceClient(api_key=KEY, base_url=url)
    (supported,) = service.get_server_capabilities().supported_models
    require((supported.model_name, supported.max_context_length) == (model, 64), "capabilities")
    trainer = service.create_lora_training_client(model, rank=8, seed=5, max_seq_len=64)
    require(trainer.policy_version == 0, "a run begins at version 0")
    held("sessions, trainers, readiness, init_trainer_server")

    sampler = trainer.save_weights_and_get_sampling_client("start")
    answer = sampler.sample(
        wire.ModelInput.from_ints(PROMPT),
        num_samples=4,
        sampling_params=wire.SamplingParams(max_tokens=4, seed=7),
    )
    rewards = [float(index % 2) for index in range(4)]
    data = taught(answer.sequences, rewards)
    for loss, config in (
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ("cispo", None),
        ("dro", {"beta": 0.05}),
        ("dppo", None),
    ):
        output = trainer.forward_backward(data, loss, config)
        step = trainer.optim_step(adam(1e-4))
        told = output.result()
        require(len(told.loss_fn_outputs) == 4, f"{loss}: an output for each datum")
        require(step.result().metrics["grad_norm"] > 0, f"{loss}: a gradient")
    held("every policy loss, its step sent before its result was asked for")

    supervised(trainer)
    custom(trainer)
    chunked(trainer)
    published(trainer, sampler)
    state(service, trainer, url, model)
    refusals(service, trainer, sampler, model)
    trainer.close()


def supervised(trainer: loops.TrainingClient) -> None:
    """cross_entropy, with forward beside it, learns."""
    row = datum([3, 4, 5, 6, 7], weights=[0.0, 1.0, 1.0, 1.0])
    before = trainer.forward([row], "cross_entropy").result().loss
    for _ in range(3):
        trainer.forward_backward([row], "cross_entropy")
        trainer.optim_step(adam()).result()
    require(trainer.forward([row], "cross_entropy").result().loss < before, "the loss falls")
    held("cross_entropy and forward")


def custom(trainer: loops.TrainingClient) -> None:
    """A loss of the client's own has the gradient of the built-in one that equals it."""
    plain = datum([3, 4, 5, 6])

    def half(_: object, logprobs: list[Tensor]) -> tuple[object, dict[str, float]]:
        def backward() -> None:
            for tensor in logprobs:
                tensor.grad = Tensor(np.full(tensor.shape, -0.5))

        return types.SimpleNamespace(backward=backward), {"mine": 1.0}

    output = trainer.forward_backward_custom([plain], half).result()
    require(output.metrics["mine"] == 1.0, "the client's own metrics are merged")
    own = trainer.optim_step(adam(0.0)).result().metrics["grad_norm"]
    weighted = datum([3, 4, 5, 6], weights=[0.5, 0.5, 0.5])
    trainer.forward_backward([weighted], "cross_entropy", {"skip_token_normalization": True})
    built_in = trainer.optim_step(adam(0.0)).result().metrics["grad_norm"]
    require(near([own], [built_in]), f"custom losses: {own} is not {built_in}")
    held("custom losses by forward and raw gradients")


def chunked(trainer: loops.TrainingClient) -> None:
    """A batch that leaves as several requests comes to the gradient of one."""
    rows = [datum([3, 4, 5, 6 + i], weights=[0.0, 1.0, 1.0]) for i in range(7)]

    def norm() -> float:
        output = trainer.forward_backward(rows, "cross_entropy").result()
        require(len(output.loss_fn_outputs) == 7, "an output for each datum of a chunked batch")
        return trainer.optim_step(adam(0.0)).result().metrics["grad_norm"]

    whole, cap = norm(), training_client._MAX_REQUEST_BYTES
    training_client._MAX_REQUEST_BYTES = 1200
    try:
        require(near([norm()], [whole]), "chunks add up")
    finally:
        training_client._MAX_REQUEST_BYTES = cap
    held("chunked batches")


def published(trainer: loops.TrainingClient, before: SamplingClient) -> None:
    """A published version is what is sampled, and its prompt logprobs are the trainer's own."""
    sampler = trainer.save_weights_and_get_sampling_client("next")
    prompt = wire.ModelInput.from_ints(PROMPT)
    greedy = wire.SamplingParams(max_tokens=3, temperature=0.0)
    answer = sampler.sample(
        prompt, sampling_params=greedy, include_prompt_logprobs=True, topk_prompt_logprobs=2
    )
    version = trainer.policy_version
    require(answer.policy_version == version > 0, "the version that was published")
    (sequence,) = answer.sequences
    row = datum(PROMPT + list(sequence.tokens))
    (output,) = trainer.forward([row], "cross_entropy").result().loss_fn_outputs
    scored = output["logprobs"].tolist()
    require(near(answer.prompt_logprobs[1:], scored[:2]), "prompt logprobs are the trainer's")
    require(near(list(sequence.logprobs), scored[2:]), "sampled logprobs are the trainer's")
    require(all(len(top) >= 2 for top in answer.topk_prompt_logprobs[1:]), "top-k of the prompt")
    require(near(sampler.compute_logprobs(prompt)[1:], scored[:2]), "compute_logprobs")
    old = before.sample(prompt, sampling_params=greedy)
    require(old.policy_version in (0, version), "a client without a floor is told its version")
    stopping = wire.SamplingParams(max_tokens=8, stop=[int(sequence.tokens[0])], temperature=0.0)
    (stopped,) = sampler.sample(prompt, sampling_params=stopping).sequences
    require(stopped.stop_reason == "stop" and len(stopped.tokens) == 1, "stop token ids")
    held("publish, pinned sampling, prompt logprobs and their top-k, compute_logprobs, stops")


def state(
    service: loops.ServiceClient, trainer: loops.TrainingClient, url: str, model: str
) -> None:
    """Checkpoints: saved, listed, fetched, loaded with and without the optimizer, sampled."""
    row = datum([3, 4, 5, 6, 7], weights=[0.0, 1.0, 1.0, 1.0])
    step = trainer.policy_version
    path = trainer.save_state("ck", ttl_seconds=3600).result().path
    loss = trainer.forward([row], "cross_entropy").result().loss
    for_sampler = trainer.save_weights_for_sampler("w").result().path
    trainer.forward_backward([row], "cross_entropy")
    trainer.optim_step(adam(0.1)).result()
    require(trainer.load_state_with_optimizer(path).result().step == step, "the step comes back")
    require(trainer.policy_version == step, "and so does the version")
    require(
        near([trainer.forward([row], "cross_entropy").result().loss], [loss]), "and the weights"
    )
    listed = {each.checkpoint_id: each for each in trainer.list_checkpoints()}
    require(set(listed) == {"ck", "w"}, f"checkpoints are listed: {set(listed)}")
    require(listed["ck"].lora_adapter_config.rank == 8, "with their rank")
    with tempfile.TemporaryDirectory() as folder:
        service.download_checkpoint(listed["ck"].id, dest_dir=f"{folder}/ck")
        names = {path.name for path in Path(folder, "ck").iterdir()}
        require("adapter_model.safetensors" in names, f"an adapter in PEFT layout: {names}")
        config = json.loads(Path(folder, "ck", "adapter_config.json").read_text())
        require(config["r"] == 8, "with its config")
    pinned = trainer.create_sampling_client(for_sampler)
    base = service.create_sampling_client(base_model=model)
    prompt = wire.ModelInput.from_ints([3, 4, 5, 6])
    trained, plain = pinned.compute_logprobs(prompt)[1:], base.compute_logprobs(prompt)[1:]
    (output,) = trainer.forward([row], "cross_entropy").result().loss_fn_outputs
    require(near(trained, output["logprobs"].tolist()[:3]), "a pinned checkpoint is what was saved")
    require(not near(trained, plain, 1e-2), "the base model is not what was trained")
    again = service.create_training_client_from_state_with_optimizer(path)
    require(again.policy_version == step, "a run from a state goes on at its step")
    require(near([again.forward([row], "cross_entropy").result().loss], [loss]), "with its weights")
    require(again.load_state(path).result().step == 0, "without the optimizer it begins at 0")
    again.health()
    again.close()
    held("state with and without optimizer, checkpoints listed, fetched and pinned, heartbeat")


def refusals(
    service: loops.ServiceClient, _: loops.TrainingClient, sampler: SamplingClient, model: str
) -> None:
    """What can't be done is refused at once; the client would repeat a plain 400 or 404 for an
    hour."""
    long = wire.ModelInput.from_ints([3] * 70)
    one = wire.SamplingParams(max_tokens=1)
    words = refused(lambda: sampler.sample(long, sampling_params=one), 422)
    require("64" in words, f"an over-long prompt is told the limit: {words}")
    refused(lambda: service.create_lora_training_client("other/model", rank=8), 422)
    refused(lambda: service.create_lora_training_client(model, rank=8, max_seq_len=4096), 422)
    trainer = service.create_lora_training_client(model, rank=8)
    refused(lambda: trainer.forward_backward([datum([3, 4, 5])], "no_such_loss").result(), 422)
    trainer.close()
    held("refusals come at once, with 422")


def without_a_control_plane(url: str, model: str) -> None:
    """The client's local mode, and its paired client with a run id; neither sends a key."""
    local = loops.ServiceClient.local(trainer_url=url, sampler_url=url)
    trainer = local.create_lora_training_client(model, rank=4)
    trainer.forward_backward([datum([3, 4, 5])], "cross_entropy")
    require(trainer.optim_step(adam()).result().metrics["grad_norm"] > 0, "local mode trains")
    sampler = local.create_sampling_client(base_model=model)
    answer = sampler.sample(
        wire.ModelInput.from_ints(PROMPT), sampling_params=wire.SamplingParams(max_tokens=2)
    )
    require(len(answer.sequences[0].tokens) > 0, "local mode samples")
    trainer.close()
    paired = loops.TrainingClient(
        url,
        lora_rank=4,
        base_model=model,
        run_id="by-hand",
        paired_sampling_deployment=LocalDeployment(url),
    )
    paired.forward_backward([datum([3, 4, 5])], "cross_entropy")
    paired.optim_step(adam()).result()
    answer = paired.save_weights_and_get_sampling_client("a").sample(
        wire.ModelInput.from_ints(PROMPT), sampling_params=wire.SamplingParams(max_tokens=2)
    )
    require(answer.policy_version == 1, "the paired client samples what it published")
    paired.close()
    held("local mode, and the paired client with a run id")


def through_the_shim(url: str, model: str) -> None:
    """A small RL script over the shim `tinker`: the reward rises."""
    import tinker

    trainer = tinker.ServiceClient(api_key=KEY, base_url=url).create_lora_training_client(
        base_model=model, rank=8, seed=1
    )
    prompt = tinker.ModelInput.from_ints(PROMPT)
    means: list[float] = []
    wanted = None
    for update in range(12):
        sampler = trainer.save_weights_and_get_sampling_client(name=f"u{update}")
        params = tinker.SamplingParams(max_tokens=3, temperature=1.0, seed=update)
        sequences = sampler.sample(prompt, num_samples=32, sampling_params=params).sequences
        if wanted is None:  # whatever was sampled second: it can be learnt, and is not yet
            wanted = sequences[1].tokens[0]
        rewards = [float(sequence.tokens[0] == wanted) for sequence in sequences]
        means.append(sum(rewards) / len(rewards))
        rows = [
            tinker.Datum(model_input=row.model_input, loss_fn_inputs=row.loss_fn_inputs)
            for row in taught(sequences, rewards)
        ]
        trainer.forward_backward(rows, "importance_sampling")
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    trainer.close()
    require(means[-1] > means[0], f"the reward rises: {means}")
    held(f"the shim's RL loop: mean reward {means[0]:.2f} -> {means[-1]:.2f}")


def as_the_page_says(url: str) -> None:
    """The loop of docs/guide/own_loop.md, for three updates."""
    root = Path(__file__).parents[1]
    page = (root / "docs/guide/own_loop.md").read_text()
    block = page.split("```python\n")[1].split("```")[0]
    code = block.replace("http://127.0.0.1:8000", url).replace("range(1, 31)", "range(1, 4)")
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    require(ran.returncode == 0, f"the loop of the page runs: {ran.stderr[-2000:]}")
    require(ran.stdout.count("reward") == 3 and "bt://" in ran.stdout, "and says what it did")
    held("the loop of docs/guide/own_loop.md")


def main() -> None:
    command, model = sys.argv[1], (sys.argv[2:] or ["models/counting"])[0]
    with tempfile.TemporaryDirectory() as folder:
        with served(command, model, Path(folder, "keyed"), key=KEY) as url:
            through_the_control_plane(url, model)
            through_the_shim(url, model)
        with served(command, model, Path(folder, "open"), key=None) as url:
            without_a_control_plane(url, model)
            as_the_page_says(url)


if __name__ == "__main__":
    main()
