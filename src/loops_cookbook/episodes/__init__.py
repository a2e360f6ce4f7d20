"""The API that environments are written against: subclass `Episode`, and name it in a config."""

from loops_cookbook.episodes.conversation import Conversation, Model, Reply
from loops_cookbook.episodes.episode import Episode
from loops_cookbook.episodes.phases import Grading, GroupAttempt, GroupGrading, Sampling, Setup
from loops_cookbook.episodes.runtime import create_runtime
from loops_cookbook.errors import Discard
from loops_cookbook.messages import ToolCall
from loops_cookbook.sandboxes.base import ExecResult, Sandbox
from loops_cookbook.tasks import Task

__all__ = [
    "Conversation",
    "Discard",
    "Episode",
    "ExecResult",
    "Grading",
    "GroupAttempt",
    "GroupGrading",
    "Model",
    "Reply",
    "Sampling",
    "Sandbox",
    "Setup",
    "Task",
    "ToolCall",
    "create_runtime",
]
