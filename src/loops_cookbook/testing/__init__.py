"""Try an Episode, or a whole run, without a model: doubles, and `attempt`."""

from loops_cookbook.testing.episodes import Terms, Tried, attempt
from loops_cookbook.testing.scripted import (
    Line,
    RecordingTrainer,
    SampleCall,
    Script,
    ScriptedSampler,
    ScriptedService,
    TrainedBatch,
)
from loops_cookbook.testing.tokenizer import ByteTokenizer, PlainRenderer

__all__ = [
    "ByteTokenizer",
    "Line",
    "PlainRenderer",
    "RecordingTrainer",
    "SampleCall",
    "Script",
    "ScriptedSampler",
    "ScriptedService",
    "Terms",
    "TrainedBatch",
    "Tried",
    "attempt",
]
