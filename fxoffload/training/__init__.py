"""Causal-LM fine-tuning under a byte budget: configuration, data, loop and checkpoints. `fxoffload train` is its command."""
