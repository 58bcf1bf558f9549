"""What a thorough search is worth: one step and budget, planned quickly and thoroughly, predicted and measured.

    python bench/searches.py plan                               writes bench/plans/searches/h200/ROW.json.xz, with no accelerator
    python bench/searches.py measure --rows ROW,ROW [--lock FILE] [--out FILE]
    python bench/searches.py table FILE ... [--out FILE]        one table

Rows, plans and measuring are those of bench/prediction.py.
"""

from __future__ import annotations

import sys

import prediction
from prediction import ROOT, Row

BUDGETS = {"lora": ("12GiB", "16GiB"), "full": ("22GiB",)}
prediction.PLANS = ROOT / "bench" / "plans" / "searches"
prediction.ROWS = {row.name: row for row in (
    Row("8B", trained, (4, 2048), budget, search, search=search)
    for trained, budgets in BUDGETS.items() for budget in budgets for search in ("quick", "thorough"))}


if __name__ == "__main__":
    sys.exit(prediction.main())
