"""Try an Episode, or a whole run, without a model: doubles, `attempt` and `attempt_group`."""

from loops_cookbook.testing.episodes import Terms, Tried, TriedGroup, attempt, attempt_group
from loops_cookbook.testing.judges import ChatScript, ChatStep, ScriptedChat, open_models
from loops_cookbook.testing.scripted import (
    Line,
    RecordingTrainer,
    SampleCall,
    Script,
    ScriptedSampler,
    ScriptedService,
    Step,
    TrainedBatch,
)
from loops_cookbook.testing.tokenizer import ByteTokenizer, PlainRenderer, tool_call

__all__ = [
    "ByteTokenizer",
    "ChatScript",
    "ChatStep",
    "Line",
    "PlainRenderer",
    "RecordingTrainer",
    "SampleCall",
    "Script",
    "ScriptedChat",
    "ScriptedSampler",
    "ScriptedService",
    "Step",
    "Terms",
    "TrainedBatch",
    "Tried",
    "TriedGroup",
    "attempt",
    "attempt_group",
    "open_models",
    "tool_call",
]
