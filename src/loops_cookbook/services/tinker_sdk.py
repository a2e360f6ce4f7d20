"""What is used of the Tinker SDK, as Protocols.

The SDK is an extra and heavy, so it is imported where a run is opened and nowhere else; these say
which of its objects `services.tinker` relies on, alike in every version that the extra allows.
Only its `async` methods are used: the others wait, on the loop that calls them.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

ResultT_co = TypeVar("ResultT_co", covariant=True)


class Future(Protocol[ResultT_co]):
    """What the service accepted and has not answered yet."""

    async def result_async(self) -> ResultT_co:
        """Wait for it; leaving early gives it up on this side."""
        ...


class Tensor(Protocol):
    """An array of the wire."""

    @property
    def data(self) -> Sequence[float]:
        """Its numbers, flat."""
        ...


class ForwardBackwardOutput(Protocol):
    """What came of a batch."""

    @property
    def loss_fn_outputs(self) -> Sequence[Mapping[str, Tensor]]:
        """One for each datum."""
        ...


class OptimStepResponse(Protocol):
    """What came of a step."""

    @property
    def metrics(self) -> Mapping[str, float] | None:
        """Named as the service likes."""
        ...


class SavedWeights(Protocol):
    """Weights that can be sampled, or trained on."""

    @property
    def path(self) -> str:
        """A `tinker://` address."""
        ...


class SampledSequence(Protocol):
    """One completion."""

    @property
    def tokens(self) -> Sequence[int]:
        """The stop token included."""
        ...

    @property
    def logprobs(self) -> Sequence[float] | None:
        """One for each token."""
        ...

    @property
    def stop_reason(self) -> str:
        """`stop` or `length`."""
        ...


class SampleResponse(Protocol):
    """The completions of one prompt."""

    @property
    def sequences(self) -> Sequence[SampledSequence]:
        """As many as were asked for."""
        ...


class SamplingClient(Protocol):
    """Draws from one set of saved weights."""

    async def sample_async(
        self, prompt: object, num_samples: int, sampling_params: object
    ) -> SampleResponse:
        """Draw completions."""
        ...


class TrainingClient(Protocol):
    """Trains one adapter."""

    @property
    def model_id(self) -> str:
        """The service's name of the adapter."""
        ...

    async def forward_backward_async(
        self, data: list[object], loss_fn: str, loss_fn_config: dict[str, float] | None
    ) -> Future[ForwardBackwardOutput]:
        """Add a batch's gradients."""
        ...

    async def forward_async(
        self, data: list[object], loss_fn: str, loss_fn_config: dict[str, float] | None
    ) -> Future[ForwardBackwardOutput]:
        """Compute a batch, without gradients."""
        ...

    async def optim_step_async(self, adam_params: object) -> Future[OptimStepResponse]:
        """Take a step on the gradients so far."""
        ...

    async def save_weights_for_sampler_async(
        self, name: str, ttl_seconds: int | None
    ) -> Future[SavedWeights]:
        """Keep the weights where they can be sampled."""
        ...

    async def save_state_async(
        self, name: str, ttl_seconds: int | None, overwrite: bool
    ) -> Future[SavedWeights]:
        """Keep the weights and the optimizer."""
        ...

    async def load_state_async(self, path: str) -> Future[object]:
        """Take the weights of what was kept."""
        ...

    async def load_state_with_optimizer_async(self, path: str) -> Future[object]:
        """Take all of it."""
        ...


class Holder(Protocol):
    """The session behind the clients."""

    def close(self) -> None:
        """Let the session end; does not wait."""
        ...


class ServiceClient(Protocol):
    """The way in."""

    @property
    def holder(self) -> Holder:
        """The session; opened, and waited for, when it is looked at first."""
        ...

    async def create_lora_training_client_async(
        self, base_model: str, rank: int, seed: int
    ) -> TrainingClient:
        """Begin to train a new adapter."""
        ...

    async def create_sampling_client_async(self, model_path: str) -> SamplingClient:
        """Sample saved weights."""
        ...


class MakeServiceClient(Protocol):
    """The class `tinker.ServiceClient`."""

    def __call__(
        self, user_metadata: dict[str, str], *, base_url: str, api_key: str
    ) -> ServiceClient:
        """Make one; may wait for the network."""
        ...


class ModelInput(Protocol):
    """The class `tinker.ModelInput`."""

    def from_ints(self, tokens: list[int]) -> object:
        """A text as its token ids."""
        ...


class MakeDatum(Protocol):
    """The class `tinker.Datum`."""

    def __call__(
        self, *, model_input: object, loss_fn_inputs: Mapping[str, npt.NDArray[np.generic]]
    ) -> object:
        """A row for the trainer."""
        ...


class MakeParams(Protocol):
    """A class of settings."""

    def __call__(self, **settings: object) -> object:
        """Settings by name."""
        ...


class Sdk(Protocol):
    """The module `tinker`."""

    __version__: str
    ServiceClient: MakeServiceClient
    ModelInput: ModelInput
    Datum: MakeDatum
    AdamParams: MakeParams
    SamplingParams: MakeParams
    APIConnectionError: type[Exception]
