"""Does a person who pins things beat the planner? One budget, the free plan and six that were made by hand, predicted and measured.

    python bench/pins.py plan                                   writes bench/plans/pins/h200/ROW.json.xz, with no accelerator
    python bench/pins.py measure --rows ROW,ROW [--lock FILE] [--out FILE]
    python bench/pins.py table FILE ... [--out FILE]            one table; how much faster the free plan is than the best of the others

Rows, plans and measuring are those of bench/prediction.py. A pin fixes what it says, and the planner does its best with the rest.
"""

from __future__ import annotations

import sys

import prediction
from prediction import ROOT, Row

# How people offload by hand, in the terms of the tools they do it with.
BY_HAND = {
    "free": (),
    # Every parameter comes from the host for each use (ZeRO-3 offload).
    "streamed": (("*", "host"),),
    # The layers' own values are made again in backward (gradient checkpointing).
    "checkpointed": (("*.mlp*", "checkpoint"), ("*.self_attn*", "checkpoint"), ("*layernorm/*", "checkpoint")),
    # Both.
    "streamed-checkpointed": (("*", "host"), ("*.mlp*", "checkpoint"), ("*.self_attn*", "checkpoint"), ("*layernorm/*", "checkpoint")),
    # Half of the layers' parameters stay on the device, the others are streamed (a device map).
    "half-on-device": (("*.layers.?.*", "device"), ("*.layers.1[0-3].*", "device"), ("*.layers.1[4-9].*", "host"), ("*.layers.2?.*", "host")),
    # What the layers hand on goes to the host (activation offloading).
    "swapped": (("*.layers.*/add#1", "swap"),),
    # Attention is never made again (selective checkpointing).
    "attention-kept": (("*.self_attn/*", "keep"),),
}
prediction.PLANS = ROOT / "bench" / "plans" / "pins"
prediction.ROWS = {row.name: row for row in (Row("3B", "lora", (4, 2048), "14GiB", label, pins) for label, pins in BY_HAND.items())}


if __name__ == "__main__":
    sys.exit(prediction.main())
