"""Train language models on what their agents do, scored by graders you write."""
