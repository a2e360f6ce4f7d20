"""The JSON bodies of the control plane, as `loops_cookbook.services.bodies` has the others."""

from pydantic import Field

from loops_cookbook.services.bodies import Answer, Request


class OpenTrainer(Request):
    """`POST /v1/loops/trainers` of a control plane: somewhere to train."""

    session_id: str | None = None
    base_model: str
    lora_rank: int = Field(32, ge=0)
    replicas: int = Field(1, ge=1)
    availability_model: str | None = None
    base_checkpoint: str | None = None
    seed: int | None = None
    max_seq_len: int | None = None
    name: str | None = None
    scope: str | None = None
    path: str | None = None
    reuse_from_run_id: str | None = None
    reuse_from_session_id: str | None = None


class OpenSampler(Request):
    """`POST /v1/loops/samplers`: somewhere to sample; paired with the trainer of a run, or not."""

    session_id: str | None = None
    run_id: str | None = None
    num_replicas: int | None = None
    availability_model: str | None = None
    model_path: str | None = None
    base_model: str | None = None
    max_seq_length: int | None = None
    reuse_from_session_id: str | None = None


class ValidateCheckpoint(Request):
    """`POST /v1/loops/checkpoints/validate`: whether a checkpoint can be had."""

    checkpoint_path: str
    run_id: str | None = None


class Opened(Answer):
    """Something of the control plane that has an id; `POST /v1/loops/sessions`."""

    id: str = Field(min_length=1)


class OpenedSession(Answer):
    """The answer of `POST /v1/loops/sessions`."""

    session: Opened


class TrainerRun(Answer):
    """A run and where it is trained."""

    id: str = Field(min_length=1)
    base_model: str
    """As the service spells it; later requests must too."""
    base_url: str = Field(min_length=1)
    deployment_id: str | None = None
    """None: serverless."""


class OpenedTrainer(Answer):
    """The answer of `POST /v1/loops/trainers`."""

    run: TrainerRun


class SamplerPlace(Answer):
    """Where a run's policy is sampled."""

    id: str
    base_url: str = Field(min_length=1)
    model_id: str | None = None
    """None: serverless."""
    deployment_id: str | None = None


class OpenedSampler(Answer):
    """The answer of `POST /v1/loops/samplers`."""

    sampler: SamplerPlace


class Status(Answer):
    """A status by its name."""

    name: str | None = None


class TrainerDeployment(Answer):
    """A deployment of a trainer."""

    status: Status = Status()


class TrainerStatus(Answer):
    """The answer of `GET /v1/loops/deployments/{id}`."""

    deployment: TrainerDeployment = TrainerDeployment()


class SamplerStatus(Answer):
    """The answer of `GET /v1/models/{model}/deployments/{id}`."""

    status: str | None = None


class SupportedModel(Answer):
    """A model that the workspace may train."""

    model_name: str
    max_context_length: int | None = None


class Capabilities(Answer):
    """The answer of `GET /v1/loops/capabilities`."""

    supported_models: tuple[SupportedModel, ...] = ()


class Team(Answer):
    """A team of the workspace."""

    id: str
    name: str


class Teams(Answer):
    """The answer of `GET /v1/teams`."""

    teams: tuple[Team, ...] = ()
