"""One training step by us and by those who do it otherwise: the same model, batch and optimizer, each in a process of its own (`run.py`)."""
