"""TOML -> validated sections: overrides, origins, hashes, nearest names. Torch-free; called by cli, train, launch and drill."""

from surefoot.config.load import LoadedConfig, load_config
from surefoot.config.resolved import resolved_toml
from surefoot.core.identity import SettingChange, diff_sections, section_hashes

__all__ = ["LoadedConfig", "SettingChange", "diff_sections", "load_config", "resolved_toml", "section_hashes"]
