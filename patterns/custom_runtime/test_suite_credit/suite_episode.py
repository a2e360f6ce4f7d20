from pydantic import BaseModel, ConfigDict, Field

from loops_cookbook.episodes import Episode, Grading, Sampling, Sandbox, Task

SYSTEM = "Reply with the program alone, without any explanation."


class Case(BaseModel):
    """What a program reads, and what it should write."""

    model_config = ConfigDict(extra="forbid")

    given: str
    wanted: str


class SuiteTask(BaseModel):
    """One line of the dataset."""

    model_config = ConfigDict(extra="forbid")

    name: str
    instruction: str
    cases: list[Case] = Field(min_length=1)


class SuiteEpisode(Episode[SuiteTask, None]):
    grading_retries = 1  # each try has a sandbox of its own

    def __init__(self, task: Task[SuiteTask], options: None) -> None:
        super().__init__(task, options)
        self.program = ""

    async def run(self, sample: Sampling) -> None:
        conversation = sample.model.conversation()
        reply = await conversation.generate(
            [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": self.task.value.instruction},
            ]
        )
        self.program = without_fence((reply.content or "").strip())

    async def grade(self, grading: Grading) -> float:
        grader = await grading.sandbox("grader")
        cases = self.task.value.cases
        solved = [await self.solves(grader, case) for case in cases]
        grading.metadata["solved_all"] = all(solved)
        return sum(solved) / len(cases)

    async def solves(self, grader: Sandbox, case: Case) -> bool:
        # What is wanted never enters the sandbox: a program can print only what it worked out. And
        # each case finds the program as it was, whatever the one before did to the files.
        await grader.write_file("program.py", self.program)
        await grader.write_file("given", case.given)
        result = await grader.exec("python3 program.py < given")
        await grader.stop_processes()
        return result.exit_status == 0 and result.stdout == case.wanted


def without_fence(text: str) -> str:
    """The program in a fenced block, or the text where it is no such block."""
    lines = text.splitlines()
    if len(lines) > 1 and lines[0].startswith("```") and lines[-1] == "```":
        return "\n".join(lines[1:-1])
    return text
