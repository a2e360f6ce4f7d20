"""An agent with two tools in a sandbox of its own, graded on the files that it leaves.

`run` gives the model its task and the tools, and goes on until it calls none. Whatever is wrong
with a call is told to the model, as a person would be told: nothing that a model says raises.
`grade` brings the files that the task asks for into a fresh sandbox and runs the task's check
there. Before that the check is in no sandbox, and nothing that the agent changed besides counts.
"""

from pydantic import BaseModel, ConfigDict, Field

from loops_cookbook.episodes import (
    Episode,
    ExecResult,
    Grading,
    Sampling,
    Sandbox,
    Setup,
    Task,
    ToolCall,
)

SYSTEM = (
    "You work on files in a Linux sandbox, with tools. Do what the task asks for and leave other "
    "files alone. When it is done, say so without calling a tool."
)


def tool(name: str, description: str, **parameters: str) -> dict[str, object]:
    """A tool's declaration in OpenAI form; its parameters are strings, and all are required."""
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    tool("shell", "Run a command with bash, in the folder of the files.", command="The command."),
    tool("write_file", "Write a text file.", path="Its path.", content="All of its text."),
]
PARAMETERS = {"shell": {"command"}, "write_file": {"path", "content"}}


class FileTask(BaseModel):
    """One line of a tasks file."""

    model_config = ConfigDict(extra="forbid")

    name: str
    rung: int
    """How hard it is, from 1."""
    instruction: str
    files: dict[str, str]
    """What the agent finds, by path."""
    graded: list[str]
    """The paths that the check looks at."""
    check: str
    """A shell command that exits with 0 if the graded files are right. No agent ever sees it."""


class AgentOptions(BaseModel):
    """The table [episode.options]."""

    model_config = ConfigDict(extra="forbid")

    turns: int = Field(default=20, ge=1)
    """Replies in one attempt, at most: far more than any task here needs."""
    shown: int = Field(default=2000, ge=2)
    """Characters of a command's stdout that the model is shown, and as many of its stderr."""


class ToolEpisode(Episode[FileTask, AgentOptions]):
    """The model works with `shell` and `write_file` until it says that it is done."""

    grading_retries = 1  # each call of grade has a sandbox of its own

    def __init__(self, task: Task[FileTask], options: AgentOptions) -> None:
        super().__init__(task, options)
        self.turns = self.calls = self.bad_calls = 0

    async def setup(self, setup: Setup) -> None:
        """Put the task's files into a sandbox."""
        sandbox = await setup.sandbox()
        for path, content in self.task.value.files.items():
            await sandbox.write_file(path, content)

    async def run(self, sample: Sampling) -> None:
        """Let the model work, and note why it ended."""
        sample.metadata["ended"] = "out of time"  # what stands if a clock cuts the agent
        sample.metadata["ended"] = await self.work(sample)

    async def work(self, sample: Sampling) -> str:
        """Carry out what the model calls until it calls nothing; why it ended."""
        sandbox = sample.sandboxes["main"]
        conversation = sample.model.conversation(tools=TOOLS)
        messages: list[dict[str, object]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": self.task.value.instruction},
        ]
        while self.turns < self.options.turns and sample.seconds_left > 0:
            reply = await conversation.generate(messages)
            self.turns += 1
            if reply.finish_reason in ("length", "context_full"):
                return reply.finish_reason  # what it has done until then is graded
            if not reply.tool_calls and not reply.malformed_tool_calls:
                return "done"
            messages.append(reply.message)
            # In their order, and not at once: a later one may need an earlier one.
            messages += [call.result(await self.use(call, sandbox)) for call in reply.tool_calls]
            if reply.malformed_tool_calls:  # which have no id that a result could name
                self.bad_calls += len(reply.malformed_tool_calls)
                problems = "; ".join(bad.problem for bad in reply.malformed_tool_calls)
                messages.append({"role": "user", "content": f"A call was not read: {problems}."})
        return "out of turns" if sample.seconds_left > 0 else "out of time"

    async def use(self, call: ToolCall, sandbox: Sandbox) -> str:
        """Do what a call asks for, and say what came of it, also where it makes no sense."""
        self.calls += 1
        if problem := problem_of(call):
            self.bad_calls += 1
            return f"error: {problem}"
        given = {key: str(value) for key, value in call.arguments.items()}
        try:
            if call.name == "shell":
                return self.shown(await sandbox.exec(given["command"]))
            await sandbox.write_file(given["path"], given["content"])
        # A folder in the way, or a NUL in the text: the model's doing, so it is the one to be told.
        except (OSError, ValueError) as error:
            return f"error: {error}"
        return f"wrote {given['path']}"

    def shown(self, result: ExecResult) -> str:
        """What a command wrote, the middle left out where it is long, and how it ended."""
        written = (cut(text.strip(), self.options.shown) for text in (result.stdout, result.stderr))
        ended = "timed out" if result.timed_out else f"exit status {result.exit_status}"
        return "\n".join([*filter(None, written), f"[{ended}]"])

    async def grade(self, grading: Grading) -> float:
        """1 if the files that the agent left pass the task's check, else 0."""
        solved = await self.is_solved(grading)
        grading.metadata |= {  # reported as rollout/turns and so on, beside the reward
            "turns": self.turns,
            "calls": self.calls,
            "bad_calls": self.bad_calls,
            f"rung_{self.task.value.rung}": solved,
        }
        return float(solved)

    async def is_solved(self, grading: Grading) -> bool:
        """Whether the check passes where there is nothing but what it is to look at."""
        grader = await grading.sandbox("grader")  # the agent was never in this one
        for path in self.task.value.graded:
            try:
                await grader.write_file(path, await grading.sandboxes["main"].read_file(path))
            except FileNotFoundError:
                continue  # then it isn't there for the check either
            except OSError:  # a folder, a pipe, a gigabyte: the agent's doing
                return False
        checked = await grader.exec(self.task.value.check)
        if checked.exit_status in (126, 127):  # a program is missing: nobody's attempt is at fault
            raise RuntimeError(f"the check cannot be run here: {checked.stderr.strip()}")
        return checked.exit_status == 0


def problem_of(call: ToolCall) -> str | None:
    """Why a call cannot be carried out: its arguments are JSON, and anything may be in them."""
    wanted = PARAMETERS.get(call.name)
    if wanted is None:
        return f"there is no tool {call.name!r}; there are {', '.join(PARAMETERS)}"
    are_strings = all(isinstance(value, str) for value in call.arguments.values())
    if {*call.arguments} != wanted or not are_strings:
        return f"{call.name} takes {' and '.join(sorted(wanted))}, each a string"
    return None


def cut(text: str, length: int) -> str:
    """The text, without its middle if it is longer than that."""
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
