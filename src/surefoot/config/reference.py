"""`docs/config.md`, written from the settings themselves: `python -m surefoot.config.reference > docs/config.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from surefoot.config.presets import PRESETS
from surefoot.config.schema import Setting, describe_wanted, sections, settings_of, table_lists
from surefoot.core.config_text import toml_value
from surefoot.core.model_sizes import resolve_sizes
from surefoot.core.sections import HASHED_SECTIONS, ModelSection
from surefoot.core.units import show_count

_HEAD = """# The config file

<!-- Written by `python -m surefoot.config.reference > docs/config.md`; a test fails when it is out of date. -->

One TOML describes a run. `surefoot train run.toml` starts it, restarts it and resumes it.

- Relative paths start at the folder of the TOML, in overrides too. In the run folder's own `config.toml` they start there, so a run folder
  that is copied together with its data can be resumed elsewhere.
- `surefoot train run.toml train.num_steps=60` overrides single settings. Values are TOML; a bare word is a string.
- An unknown or misplaced key, a value of another type, `nan` and `inf` are refused with file, line and the nearest valid name.
- `surefoot config show run.toml` prints every setting and where it came from, and the hash of each section that identifies the run. A
  resume under another hash is refused until the change is accepted by name. Marked **identity** below; paths never count.
"""

_LISTS = {
    "stage": "**Identity** as far as it lies behind: a stage that has not begun may be added, moved or taken out at any start. "
    "docs/stages.md has an example."
}
_VOCAB_SIZES = {"tiny": 8192, "quickstart": 8192, "1b": 128256, "8b": 128256}


def reference() -> str:
    """The whole page as Markdown."""
    lines = [_HEAD]
    for name, section in sections().items():
        lines += _section(f"[{name}]", section, note=_note(name))
        for setting in settings_of(section).values():
            if setting.item_section:
                lines += _section(f"[[{name}.{setting.key}]]", setting.item_section, note="")
    for name, section in table_lists().items():
        lines += _section(f"[[{name}]]", section, note=_LISTS[name])
    lines += ["## Model presets", "", "| preset | sizes | parameters |", "| --- | --- | --- |"]
    for name, sizes in PRESETS.items():
        shown = ", ".join(f"{key} {toml_value(value)}" for key, value in sizes.items())
        vocab_size = _VOCAB_SIZES.get(name, 50304)
        count = show_count(resolve_sizes(ModelSection(**sizes), vocab_size).num_parameters)
        lines.append(f"| `{name}` | {shown} | {count} with a vocabulary of {vocab_size:,} |")
    return "\n".join(lines) + "\n"


def _note(name: str) -> str:
    if name == "run":
        return "Identity: `seed` alone."
    return "**Identity** of the run." if name in HASHED_SECTIONS else ""


def _section(title: str, section: type, *, note: str) -> Iterator[str]:
    yield from (f"## {title}", "")
    if note:
        yield from (note, "")
    settings = settings_of(section)
    if not settings:
        yield from ("No settings in this release.", "")
        return
    yield from ("| key | default | wanted | why |", "| --- | --- | --- | --- |")
    for setting in settings.values():
        yield f"| `{setting.key}` | {_default(setting)} | {_cell(describe_wanted(setting))} | {_cell(setting.why)} |"
    yield ""


def _default(setting: Setting) -> str:
    if setting.is_table:
        return "`{}`"
    return "" if setting.item_section else f"`{toml_value(setting.default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(reference())
