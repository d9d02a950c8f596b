"""Find models by their names on the Hugging Face hub, such as ``Qwen/Qwen2.5-14B``, in the local
cache.

Nothing is downloaded. The cache has a folder ``models--OWNER--NAME`` per model with ``refs/main``,
the name of a revision, and ``snapshots/REVISION/config.json``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

# Form of a name on the hub: OWNER/NAME.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def is_hub_name(name: str) -> bool:
    """Return whether a text has the form OWNER/NAME; a file of that name takes precedence.

    >>> is_hub_name("Qwen/Qwen2.5-14B"), is_hub_name("models/a/b"), is_hub_name("./gpt2")
    (True, False, False)
    """
    return _HUB_NAME.fullmatch(name) is not None and ".." not in name


def hub_cache() -> Path:
    """Return the folder that the hub's tools download to, from their environment variables."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder)
    home = os.environ.get("HF_HOME")
    base = (
        Path(home)
        if home
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )
    return base / "hub"


def cached_config(name: str) -> Path | None:
    """Return the config of a model in the cache, of its main revision or else of any; None if it is
    not there."""
    if not is_hub_name(name):
        return None
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        candidates = (
            [folder / "snapshots" / revision / "config.json"]
            if re.fullmatch(r"[0-9a-f]{4,64}", revision)
            else []
        )
        candidates += sorted((folder / "snapshots").glob("*/config.json"))
    except (OSError, UnicodeDecodeError):
        candidates = sorted(folder.glob("snapshots/*/config.json"))
    return next((path for path in candidates if path.is_file()), None)
