"""The passes of fxoffload. Each module holds one and names it PASS; they reach each other only through a Pipeline."""

if __name__ != "fxoffload.passes":
    raise ImportError("this folder is installed as fxoffload.passes; import it under that name")

# The pipeline in one readable tuple each. "reorder" leaves out of a canonical graph what numerics="reordered" allows to, "plan" decides on
# one, "lower" applies a plan to one, "place" plans where a lowered graph's values lie.
PIPELINES = {
    "reorder": ("fold-zeros", "merge-transposed"),
    "plan": (
        "plan-lookups", "look-up", "plan-recompute", "sink-gradients", "insert-checkpoint", "recompute", "plan-swap", "insert-gather", "lower-gather", "insert-swap",
        "hoist-transfers", "sink-waits", "plan-buckets",
    ),
    "lower": (
        "defer-outputs", "chunk-loss", "chunk-rows", "look-up", "sink-gradients", "insert-checkpoint", "recompute", "insert-gather", "lower-gather", "insert-swap",
        "hoist-transfers", "sink-waits", "bucket-transfers", "insert-release",
    ),
    "place": ("assign-offsets",),
}
