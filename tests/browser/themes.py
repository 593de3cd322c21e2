"""The colours that ComfyUI's own themes set on its page; older versions have another ground in the same theme."""

from __future__ import annotations

THEMES = {
    "dark": {
        "--fg-color": "#fff", "--bg-color": "#202020", "--comfy-menu-bg": "#171718",
        "--comfy-menu-secondary-bg": "#353535", "--comfy-input-bg": "#222", "--input-text": "#ddd",
        "--descrip-text": "#999", "--border-color": "#4e4e4e", "--error-text": "#ff4444", "--node-color": "#353535",
    },
    "light": {
        "--fg-color": "#222", "--bg-color": "#ddd", "--comfy-menu-bg": "#fff", "--comfy-menu-secondary-bg": "#f5f5f5",
        "--comfy-input-bg": "#c9c9c9", "--input-text": "#222", "--descrip-text": "#444", "--border-color": "#888",
        "--error-text": "#f44336", "--node-color": "#f2f2f2",
    },
}  # fmt: skip
THEMES["dark-0.3.64"] = THEMES["dark"] | {"--comfy-menu-bg": "#353535"}
THEMES["light-0.3.64"] = THEMES["light"] | {"--comfy-menu-bg": "#f5f5f5"}
