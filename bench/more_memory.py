"""What more device memory gives: one step under one budget after the other, predicted and measured.

    python bench/more_memory.py plan                               writes bench/plans/more_memory/h200/ROW.json.xz, with no accelerator
    python bench/more_memory.py measure --rows ROW,ROW [--lock FILE] [--out FILE]
    python bench/more_memory.py table FILE ... [--out FILE]        one table

Rows, plans and measuring are those of bench/prediction.py.
"""

from __future__ import annotations

import sys

import prediction
from prediction import ROOT, Row

BUDGETS = ("9GiB", "10GiB", "12GiB", "14GiB", "16GiB", "18GiB", "22GiB", "28GiB")
prediction.PLANS = ROOT / "bench" / "plans" / "more_memory"
prediction.ROWS = {row.name: row for row in (Row("3B", "lora", (4, 2048), budget) for budget in BUDGETS)}


if __name__ == "__main__":
    sys.exit(prediction.main())
