"""The rest of a run, planned from what it has measured."""
