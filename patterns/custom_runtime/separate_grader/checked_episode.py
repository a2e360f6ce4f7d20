from pydantic import BaseModel, ConfigDict

from loops_cookbook.episodes import Episode, Grading, Sampling, Setup

SYSTEM = "Reply with one shell script that does the task, and nothing else. It is run as it is."


class CheckedTask(BaseModel):
    """One line of the dataset."""

    model_config = ConfigDict(extra="forbid")

    name: str
    instruction: str
    files: dict[str, str]
    makes: list[str]  # what the agent is to make: only these are graded
    check: str  # a shell command that exits with 0 when the task is done; the agent never sees it


class CheckedEpisode(Episode[CheckedTask, None]):
    grading_retries = 1  # each try has a sandbox of its own

    async def setup(self, setup: Setup) -> None:
        sandbox = await setup.sandbox()
        for path, content in self.task.value.files.items():
            await sandbox.write_file(path, content)

    async def run(self, sample: Sampling) -> dict[str, int]:
        conversation = sample.model.conversation()
        reply = await conversation.generate(
            [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": self.task.value.instruction},
            ]
        )
        result = await sample.sandboxes["main"].exec(reply.content or "true")
        return {"status": result.exit_status}

    async def grade(self, grading: Grading) -> float:
        grader = await grading.sandbox("grader")  # the agent was never in this one
        for path in self.task.value.makes:
            try:
                made = await grading.sandboxes["main"].read_file(path)
            except OSError:
                return 0.0
            await grader.write_file(path, made)
        return float((await grader.exec(self.task.value.check)).exit_status == 0)
