"""Measuring a Machine: `run.calibrate` makes the JSON that `fxoffload.machine` loads."""
