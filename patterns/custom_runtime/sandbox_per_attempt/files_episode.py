from pydantic import BaseModel, ConfigDict

from loops_cookbook.episodes import Episode, Grading, Sampling, Setup

SYSTEM = (
    "You work in a Linux shell. Each of your replies is run as it is, and you are told what it "
    "wrote. Reply with commands alone, and with DONE when the task is done."
)


class FilesTask(BaseModel):
    """One line of the dataset."""

    model_config = ConfigDict(extra="forbid")

    name: str
    instruction: str
    files: dict[str, str]
    path: str
    content: str


class FilesOptions(BaseModel):
    """The table [episode.options]."""

    model_config = ConfigDict(extra="forbid")

    turns: int = 4


class FilesEpisode(Episode[FilesTask, FilesOptions]):
    async def setup(self, setup: Setup) -> None:
        sandbox = await setup.sandbox()
        for path, content in self.task.value.files.items():
            await sandbox.write_file(path, content)

    async def run(self, sample: Sampling) -> dict[str, str | int]:
        conversation = sample.model.conversation()
        messages: list[dict[str, object]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": self.task.value.instruction},
        ]
        for turn in range(self.options.turns):
            reply = await conversation.generate(messages)
            command = (reply.content or "").strip()
            if command in ("", "DONE"):
                return {"ended": "done" if command else "nothing said", "commands": turn}
            result = await sample.sandboxes["main"].exec(command)
            told = f"{result.stdout[-2000:]}{result.stderr[-2000:]}[status {result.exit_status}]"
            messages.append(reply.message)
            messages.append({"role": "user", "content": told})
        return {"ended": "out of turns", "commands": self.options.turns}

    async def grade(self, grading: Grading) -> float:
        try:  # whatever the agent put there, it is the agent's doing
            left = await grading.sandboxes["main"].read_file(self.task.value.path)
        except OSError:
            return 0.0
        return float(left.decode(errors="replace").strip() == self.task.value.content)
