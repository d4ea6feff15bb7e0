"""`python -m surefoot.plan.textbook` writes docs/textbook.md."""

from __future__ import annotations

import sys

from surefoot.plan.textbook.page import markdown

sys.stdout.write(markdown())
