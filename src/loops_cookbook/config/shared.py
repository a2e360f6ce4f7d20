"""The tables that recipes share, such as `[compute]`, `[model]` and `[output]`."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field, field_validator

from loops_cookbook.config.base import Count, Seconds, StrictModel, Text
from loops_cookbook.problems import Problem, found

SCOPES = ("local", "remote", "serverless", "dedicated", "deployment", "tinker")
"""What `scope` may be called, a service of one's own apart; `deployment` is another name of
`dedicated`."""
TOLD_SCOPES = "local, remote, serverless, dedicated (also called deployment), tinker"
"""The same for people."""


def _that_matches(pattern: str, told: str) -> AfterValidator:
    """Refuses a text that does not match, with what to write instead, for people."""

    def matching(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"found {found(text)}; {told}")
        return text

    return AfterValidator(matching)


Url: TypeAlias = Annotated[
    str, _that_matches(r"https?://[^\s/]+\S*", "write a URL such as http://gpu-host:8000")
]
"""An HTTP address."""


Project: TypeAlias = Annotated[
    str,
    _that_matches(
        r"[^\s/\\#?%:][^/\\#?%:]{0,127}",
        "use 1 to 128 characters, none of them / \\ # ? % or : and the first no space",
    ),
]
"""What both trackers take as a project's name."""


class ComputeTable(StrictModel):
    """Who trains and who samples."""

    scope: Text | None = None
    """`local`: the embedded engine, started by the command; `remote`: servers that run already, at
    `trainer_url` and `sampler_url`; `serverless`, `dedicated` (also called `deployment`): hosted
    Loops; `tinker`: the Tinker API at `TINKER_BASE_URL`, of SkyRL or Thinking Machines, with
    `TINKER_API_KEY`; `module:factory`: a service of your own, its module beside the config.
    `--scope` goes before it. Unset: `BASETEN_LOOPS_SCOPE`, else by the model: a bundled model or a
    local folder is `local`."""

    trainer_url: Url | None = None
    """With scope `remote`: where the Loops protocol's trainer is served, as by `loops serve`."""

    sampler_url: Url | None = None
    """With scope `remote`: where its sampler is. Unset: `trainer_url`."""

    api_key_env: Text | None = None
    """With scope `remote`: the environment variable that holds the servers' key. Unset: none is
    sent."""

    options: dict[str, object] | None = None
    """Options of a service of your own, validated by the model that its factory names."""

    @field_validator("scope")
    @classmethod
    def _a_scope(cls, scope: str | None) -> str | None:
        if scope is None or scope in SCOPES or ":" in scope:
            return scope
        raise ValueError(
            f"there is no scope {found(scope)}; it is one of {TOLD_SCOPES}, or "
            "module:factory for a service of your own"
        )

    deterministic: bool = False
    """Embedded engine only: no calls are merged and each request is decoded alone. What a seed
    gives then depends on nothing else that is sampled, to the last bit, and takes longer."""

    def broken_rules(self) -> Iterator[Problem]:
        """A server that runs already has an address."""
        if self.scope == "remote" and self.trainer_url is None:
            yield Problem(
                ("trainer_url",),
                'missing; scope "remote" needs the address of a server, such as '
                '"http://gpu-host:8000"',
            )


class ModelTable(StrictModel):
    """The model that is trained."""

    name: Text
    """A hub id, a local folder, a bundled model such as `models/counting`, or one that
    `loops models fetch` has fetched, such as `smollm2-135m`. A folder of that path
    beside the config or in the working directory goes before the others."""

    max_seq_len: Annotated[int, Field(ge=2)] = 1024
    """Tokens that a prompt and its reply may have together."""

    lora_rank: Annotated[int, Field(ge=0)] = 32
    """Rank of the LoRA adapter. 0 trains every weight, which only the embedded engine does."""

    lora_alpha: Annotated[float, Field(gt=0)] = 32
    """The adapter's output is scaled by `lora_alpha / lora_rank`."""

    tokenizer: Text | None = None
    """Hub id or folder of another tokenizer. Unset: the model's own."""

    renderer: Text | None = None
    """Name of the renderer to use, whatever the model is called. Unset: found by the model."""

    thinking_retention: Literal["template", "all"] = "template"
    """What later turns see of earlier reasoning: what the chat template keeps, or `all` of it, so
    that every turn extends the one before."""

    init: Literal["pretrained", "random"] = "pretrained"
    """Where training starts: from the folder's weights, or from `random` ones in the shape that its
    `config.json` says; then the folder needs no weights, and `lora_rank` must be 0. Only the
    embedded engine can start from random weights."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Of the adapter's first weights, or of all weights where they start random."""

    start_from: Text | None = None
    """A checkpoint whose weights training starts from, its optimizer left out: a run folder (its
    last), `RUN_DIR@<update>`, or a path of the scope's service, `bt://...` or `tinker://...`. A run
    folder is looked for beside the config, then in the working directory."""

    def broken_rules(self) -> Iterator[Problem]:
        """`lora_alpha` scales an adapter, so it needs one; and an adapter needs a model."""
        if self.lora_rank == 0 and "lora_alpha" in self.model_fields_set:
            yield Problem(
                ("lora_alpha",),
                "set, but lora_rank = 0 trains every weight without an adapter; remove it",
            )
        if self.init == "random" and self.lora_rank > 0:
            yield Problem(
                ("init",),
                f"found 'random' with lora_rank = {self.lora_rank}, an adapter beside random "
                "weights that would never be trained; set lora_rank = 0",
            )


class SamplingTable(StrictModel):
    """How the policy's replies are drawn in training; an evaluation set may differ."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Replies are drawn from the distribution at this temperature."""

    max_tokens: Count = 256
    """Tokens of one reply."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that hold this much probability together. 1: from all."""

    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from this many of the likeliest tokens. 0: from all."""

    stop: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Strings that end a reply; the one that ended it stays part of it."""

    max_attempt_tokens: Count | None = None
    """Tokens over all replies of an attempt. Unset: no limit."""

    def broken_rules(self) -> Iterator[Problem]:
        """Training needs attempts that differ."""
        if self.temperature == 0:
            yield Problem(
                ("temperature",),
                "found 0, which draws every attempt of a group alike, so that none teaches; use "
                "more than 0 (an evaluation set may have 0)",
            )


class AdamTable(StrictModel):
    """The optimizer's own settings."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the mean of gradients."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the mean of squared gradients."""

    eps: Annotated[float, Field(gt=0)] = 1e-12
    """Added to the root of the mean of squared gradients."""


class OutputTable(StrictModel):
    """What a run leaves, and where."""

    output_dir: Text | None = None
    """Folder of this config's runs, in the working directory. Unset: `runs/` and the name of the
    config's folder."""

    trace: Literal["full", "samples", "off"] = "full"
    """Transcripts that are written: `full`, of every attempt; `samples`, of the first two of each
    group and of the first at each task of an evaluation; `off`, none."""

    progress_every_seconds: Seconds = 30
    """Seconds between two lines of progress."""

    wandb_project: Project | None = None
    """Project of Weights & Biases that every metric is sent to as well, by its own package (extra
    `wandb`), which also reads `WANDB_API_KEY`, `WANDB_ENTITY` and `WANDB_MODE`. Unset: none."""

    trackio_project: Project | None = None
    """Project of Trackio that every metric is written to as well, by its own package (extra
    `trackio`): on this machine, unless `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` says where.
    Unset: none."""
