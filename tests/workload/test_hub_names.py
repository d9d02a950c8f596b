"""Models by their names on the Hugging Face hub: from the local cache, or a message that names the
download."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from argosy.errors import InputError
from argosy.workload.hub import cached_config, hub_cache
from argosy.workload.load import load_model

CONFIG = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path / "models--Some--Model-2.5"


def put(folder: Path, revision: str, layers: int) -> None:
    path = folder / "snapshots" / revision / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))


def test_a_cached_model_has_its_name_and_its_main_revision(cache: Path) -> None:
    put(cache, "aaaa", 2)
    put(cache, "bbbb", 5)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("bbbb")
    chain = load_model("Some/Model-2.5", sequence_length=16)
    assert chain.name == "Some/Model-2.5"
    assert len(chain.layers) == 7


@pytest.mark.parametrize("main", [None, "cccc", "../../..", "\x00"])
def test_without_a_usable_main_revision_any_is_taken(cache: Path, main: str | None) -> None:
    put(cache, "aaaa", 2)
    if main is not None:
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text(main)
    assert cached_config("Some/Model-2.5") == cache / "snapshots" / "aaaa" / "config.json"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Qwen/Qwen2.5-14B",
            'hf download Qwen/Qwen2.5-14B config.json; "qwen2.5-14b" is the same shape',
        ),
        ("Some/Other", "hf download Some/Other config.json"),
    ],
)
def test_what_is_not_cached_names_the_download(cache: Path, name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model(name)
    assert str(caught.value).endswith(message)


def test_names_that_lead_out_of_the_cache_are_none(cache: Path) -> None:
    assert cached_config("../x") is None
    assert cached_config("a/../../b") is None


def test_the_cache_is_where_the_variables_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub_cache() == tmp_path / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", "/data")
    assert hub_cache() == Path("/data/hub")
