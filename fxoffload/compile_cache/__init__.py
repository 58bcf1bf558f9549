"""What a capture was turned into, kept on disk for the next start of the same training (`cache_dir` of `fxoffload.compile`).

Dynamo always runs: it makes the guards. Its graph, with everything else that decides what comes of it, is the key (`key`). An entry
holds the lowered graph as text and the Plan (`entry`); a file holds key and entry, and is taken only when its key, compared whole,
is the same (`files`). AOTAutograd then traces one node that stands in for the model (`stand_in`), so that the wrappers it makes are its
own, and is handed the stored graph where it asks for a partition (`store`). What cannot be told whole is not stored: `Unstored`.
"""
