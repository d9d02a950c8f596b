"""Every way to name a model, and what wins where several things say the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.workload.load import load_architecture, load_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
    "max_position_embeddings": 131072,
    "torch_dtype": "float16",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_folder_its_config_and_a_renamed_config_are_one_model(folder: Path) -> None:
    from_folder, from_file = load_model(folder), load_model(str(folder / "config.json"))
    assert from_folder == from_file
    assert from_folder.name == "tiny-llama"
    renamed = (folder / "config.json").rename(folder / "other.json")
    assert load_model(renamed).layers == from_folder.layers
    assert load_model(renamed).name == "other"


def test_the_config_says_dtype_and_length_up_to_4096(folder: Path) -> None:
    chain = load_model(folder)
    assert (chain.sequence_length, chain.dtype, chain.optimizer) == (4096, Dtype.FP16, "adamw")


def test_the_caller_wins_over_the_file() -> None:
    preset = load_model("llama-3-8b")
    assert (preset.sequence_length, preset.dtype, preset.optimizer) == (8192, Dtype.BF16, "adamw")
    chosen = load_model("llama-3-8b", sequence_length=100, dtype=Dtype.FP32, optimizer="sgd")
    assert (chosen.sequence_length, chosen.dtype, chosen.optimizer) == (100, Dtype.FP32, "sgd")


def test_a_preset_file_of_ones_own(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if isinstance(value, (int, str))}
    lines = ['name = "mine"', "sequence_length = 77", "[config]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in config.items()]
    (tmp_path / "mine.toml").write_text("\n".join(lines))
    chain = load_model(tmp_path / "mine.toml")
    assert (chain.name, chain.sequence_length, chain.dtype) == ("mine", 77, Dtype.FP16)


def test_a_preset_wins_over_a_folder_of_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.rename(folder.parent / "gpt2")
    monkeypatch.chdir(folder.parent)
    assert load_model("gpt2").parameters == 124_439_808
    assert load_model("./gpt2").parameters < 1_000_000


def test_loading_a_model_imports_neither_torch_nor_transformers() -> None:
    program = "import sys; from argosy.workload.load import load_model; load_model('gpt2')"
    program += "; print({'torch', 'transformers'} & {*sys.modules})"
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert shown.stdout == "set()\n"


def test_a_model_whose_shape_nobody_knows_has_no_architecture(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{}")
    with pytest.raises(
        InputError, match=r"expected a model whose shape is known: a preset or a config.json"
    ):
        load_architecture(path)
