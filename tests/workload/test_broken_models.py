"""What a user may get wrong about a model, and exactly what they are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from argosy.errors import InputError
from argosy.workload.huggingface import FAMILIES
from argosy.workload.imports.dapple import read_dapple
from argosy.workload.load import load_model
from argosy.workload.profile_file import read_profile

LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def message(path: Path, **options: object) -> str:
    """What loading ``path`` says, without the folder it lies in."""
    with pytest.raises(InputError) as caught:
        load_model(path, **options)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{path.parent}/", "")


def config(folder: Path, content: dict[str, object] | str) -> Path:
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
    return path


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"hidden_size": "64"},
            'config.json:4: hidden_size: found "64", expected a whole number, at least 1',
        ),
        (
            {"num_hidden_layers": 0},
            "config.json:6: num_hidden_layers: found 0, expected a whole number, at least 1",
        ),
        (
            {"num_hidden_layers": 10**7},
            "config.json:6: num_hidden_layers: found 10000000, expected a whole number, at most 10000",
        ),
        (
            {"model_type": "qwen3_moe", "num_local_experts": 4},
            "config.json: num_experts_per_tok: found 8, expected at most num_experts (4)",
        ),
        (
            {"dtype": ["float32"]},
            'config.json:9: dtype: found a list of 1, expected one of "float32", "float16", "bfloat16"',
        ),
        (
            {"vocab_size": -5},
            "config.json:3: vocab_size: found -5, expected a whole number, at least 1",
        ),
        (
            {"intermediate_size": 12.5},
            "config.json:5: intermediate_size: found 12.5, expected a whole number, at least 1",
        ),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            "config.json:7: num_attention_heads: found 5, expected a divisor of hidden_size (64); the nearest is 4",
        ),
        (
            {"num_key_value_heads": 3},
            "config.json:8: num_key_value_heads: found 3, expected a divisor of num_attention_heads (4); "
            "the nearest is 2",
        ),
        (
            {"tie_word_embeddings": "yes"},
            'config.json:9: tie_word_embeddings: found "yes", expected a valid boolean',
        ),
        (
            {"attention_dropout": 1.5},
            "config.json:9: attention_dropout: found 1.5, expected a share of at least 0 and below 1",
        ),
        (
            {"torch_dtype": "bfloat"},
            'config.json:9: torch_dtype: found "bfloat", expected one of "float32", "float16", "bfloat16"; '
            'did you mean "bfloat16"?',
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4},
            "config.json:10: num_experts_per_tok: found 4, expected at most num_local_experts (2)",
        ),
    ],
)
def test_one_wrong_value(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    assert message(config(tmp_path, LLAMA | changes)) == expected


def test_all_problems_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    broken = LLAMA | {
        "vocab_size": "big",
        "num_hidden_layers": -1,
        "num_attention_heads": 7,
        "num_key_value_heads": 3,
    }
    del broken["intermediate_size"]
    assert message(config(tmp_path, broken)).splitlines() == [
        "config.json: intermediate_size: expected a value: this field is required",
        'config.json:3: vocab_size: found "big", expected a whole number, at least 1',
        "config.json:5: num_hidden_layers: found -1, expected a whole number, at least 1",
        "config.json:6: num_attention_heads: found 7, expected a divisor of hidden_size (64); the nearest is 8",
        "config.json:7: num_key_value_heads: found 3, expected a divisor of num_attention_heads (7); the nearest is 1",
    ]


def test_head_dim_frees_the_hidden_size(tmp_path: Path) -> None:
    free = LLAMA | {"num_attention_heads": 6, "head_dim": 10}
    assert load_model(config(tmp_path, free)).layers[1].parameters > 0


def test_unknown_model_type(tmp_path: Path) -> None:
    assert message(config(tmp_path, LLAMA | {"model_type": "lama"})) == (
        'config.json:2: model_type: found "lama", expected one of the supported model types '
        f'{", ".join(FAMILIES)}; did you mean "llama"?'
    )


def test_model_type_that_is_no_text(tmp_path: Path) -> None:
    assert message(config(tmp_path, LLAMA | {"model_type": 3})) == (
        f"config.json:2: model_type: found 3, expected one of the supported model types {', '.join(FAMILIES)}"
    )


def test_a_patch_larger_than_the_image(tmp_path: Path) -> None:
    vit = {
        key: value
        for key, value in LLAMA.items()
        if key not in ("vocab_size", "num_key_value_heads")
    }
    path = config(tmp_path, vit | {"model_type": "vit", "image_size": 8, "patch_size": 16})
    assert message(path) == "config.json:8: patch_size: found 16, expected at most image_size (8)"


def test_json_that_is_none(tmp_path: Path) -> None:
    path = config(tmp_path, '{"model_type": "llama",\n "hidden_size": }')
    assert message(path) == "config.json:2: found no value, expected valid JSON"


def test_json_that_is_no_model(tmp_path: Path) -> None:
    assert message(config(tmp_path, {"a": 1})) == (
        'config.json: expected "model_type" of a Hugging Face config, or "rows" of a measured profile'
    )


def test_a_folder_without_config(tmp_path: Path) -> None:
    assert message(tmp_path / "model") == "model: there is no such file or folder"
    (tmp_path / "model").mkdir()
    assert message(tmp_path / "model") == "model/config.json: there is no such file"


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_text("")
    expected = "weights.bin: expected a .json, .toml or .txt file, or a folder with a config.json"
    assert message(tmp_path / "weights.bin") == expected


def test_unknown_preset() -> None:
    with pytest.raises(InputError) as caught:
        load_model("llama3-8b")
    assert str(caught.value) == (
        'model: found "llama3-8b", expected a file, a folder or one of the presets '
        'that `argosy models` lists; did you mean "llama-3-8b"?'
    )


def test_wrong_choices_all_at_once() -> None:
    with pytest.raises(InputError) as caught:
        load_model("gpt2", sequence_length=0, dtype="bf15", optimizer="AdamW")
    assert str(caught.value).splitlines() == [
        "sequence_length: found 0, expected a whole number of tokens, at least 1",
        'dtype: found "bf15", expected one of the dtypes fp32, tf32, fp16, bf16, fp8; did you mean "bf16"?',
        'optimizer: found "AdamW", expected one of the optimizers adamw, adam, lion, momentum, adamw8bit, '
        "adafactor, sgd; "
        'did you mean "adamw"?',
    ]


@pytest.mark.parametrize(
    ("name", "length", "expected"),
    [
        (
            "gpt2",
            1025,
            "sequence_length: found 1025, expected at most 1024: gpt2 has learned no position beyond",
        ),
        (
            "vit-base",
            196,
            "sequence_length: found 196, expected 197: an image of vit-base is 196 patches and a class token",
        ),
    ],
)
def test_a_sequence_without_positions(name: str, length: int, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model(name, sequence_length=length)
    assert str(caught.value) == expected


def test_rotary_positions_have_no_end() -> None:
    assert load_model("llama-2-7b", sequence_length=100_000).sequence_length == 100_000


PRESET = """\
name = "toy"
parameters = 5
sequence_len = 128
dtype = "half"

[config]
model_type = "gpt2"
vocab_size = 100
n_embd = 30
n_layer = 2
n_head = 4
"""


def test_a_preset_with_problems_in_both_parts(tmp_path: Path) -> None:
    path = tmp_path / "toy.toml"
    path.write_text(PRESET)
    assert message(path).splitlines() == [
        "toy.toml:3: sequence_len: found an unknown field, expected one of the fields config, dtype, name, "
        'optimizer, parameters, sequence_length, source; did you mean "sequence_length"?',
        'toy.toml:4: dtype: found "half", expected one of the dtypes fp32, tf32, fp16, bf16, fp8',
        "toy.toml:6: config.n_positions: expected a value: this field is required",
        "toy.toml:11: config.n_head: found 4, expected a divisor of n_embd (30); the nearest is 3",
    ]


def test_a_preset_with_another_count(tmp_path: Path) -> None:
    path = tmp_path / "toy.toml"
    path.write_text(
        'name = "toy"\nparameters = 5\n[config]\n'
        + "\n".join(f"{k} = {v!r}" for k, v in LLAMA.items())
    )
    assert (
        message(path) == "toy.toml:2: parameters: found 5, expected 202048, the count of its config"
    )


def test_a_preset_without_config(tmp_path: Path) -> None:
    path = tmp_path / "toy.toml"
    path.write_text('name = "toy"\n')
    assert message(path) == "toy.toml: config: expected a value: this field is required"


PROFILE = """\
{"version": 1, "device": "A100-80GB", "model": "toy",
 "rows": [
  {"layer": "block", "micro_batch": 1, "tensor_width": 1, "dtype": "bf16", "forward_seconds": 1,
   "backward_seconds": 2},
  {"layer": "block", "micro_batch": 2, "tensor_width": 1, "dtype": "bf16", "forward_seconds": 1,
   "backward_seconds": 2}
 ],
 "layers": [
  {"name": "block.0", "kind": "block", "parameters": 1, "activation_bytes": 1, "output_bytes": 1},
  {"name": "block.1", "kind": "block", "parameters": 1, "activation_bytes": 1, "output_bytes": 1}
 ]}
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"version": 1', '"version": 2', "p.json:1: version: found 2, expected one of 1"),
        (
            '"micro_batch": 2',
            '"micro_batch": 0',
            "p.json:5: rows[1].micro_batch: found 0, expected a whole number, at least 1",
        ),
        (
            '"micro_batch": 2',
            '"micro_batch": 1',
            "p.json:5: rows[1]: found \"block, micro-batch 1, tensor width 1, bf16\", expected a measurement "
            "that rows[0] does not hold",
        ),
        (
            '"backward_seconds": 2},',
            '"backward_seconds": -2},',
            "p.json:4: rows[0].backward_seconds: found -2, expected a finite number, at least 0",
        ),
        (
            '"backward_seconds": 2},',
            '"backward_seconds": NaN},',
            "p.json:4: rows[0].backward_seconds: found nan, expected a finite number, at least 0",
        ),
        (
            '"layer": "block", "micro_batch": 2',
            '"layer": "blocks", "micro_batch": 2',
            'p.json:5: rows[1].layer: found "blocks", expected the name or kind of a layer; '
            'did you mean "block"?',
        ),
        (
            '"block.1", "kind": "block"',
            '"block.0", "kind": "block", "tied_to": 2',
            'p.json:10: layers[1].name: found "block.0", expected a name that no other layer has\n'
            "p.json:10: layers[1].tied_to: found 2, expected the index of a layer, below 2",
        ),
        (
            '"micro_batch": 2, "tensor_width": 1, "dtype": "bf16"',
            '"micro_batch": 2, "tensor_with": 1, "dtype": "bf17"',
            "p.json:5: rows[1].tensor_width: expected a value: this field is required\n"
            'p.json:5: rows[1].dtype: found "bf17", expected one of the dtypes fp32, tf32, fp16, bf16, fp8; '
            'did you mean "bf16"?\n'
            "p.json:5: rows[1].tensor_with: found an unknown field, expected one of the fields "
            "backward_seconds, dtype, forward_seconds, layer, micro_batch, peak_bytes, tensor_width; "
            'did you mean "tensor_width"?',
        ),
    ],
)  # fmt: skip
def test_a_broken_profile(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = tmp_path / "p.json"
    assert old in PROFILE
    path.write_text(PROFILE.replace(old, new, 1))
    assert message(path) == expected


def test_a_profile_without_layers_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    content = json.loads(PROFILE)
    del content["layers"]
    path.write_text(json.dumps(content))
    assert read_profile(path).forward_seconds("block", 1) == 1
    assert (
        message(path) == "toy: layers: expected a list of layers: times alone do not make a model"
    )


def test_a_measured_model_keeps_its_own_settings(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(PROFILE)
    assert (
        message(path, sequence_length=7)
        == "sequence_length: found 7, expected 1, as toy was measured"
    )
    assert (
        message(path, dtype="fp32")
        == 'dtype: found "fp32", expected a measured dtype of toy (bf16)'
    )


NODE = "forward_compute_time=1, backward_compute_time=2, activation_size=3, parameter_size=4"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"node1 -- a -- {NODE}\nnode2: b\n",
            'm-pbs-1.txt:2: found "node2: b", expected "node -- label -- field=value, ..." or, indented, '
            '"node -- node"',
        ),
        (
            f"node1 -- a -- {NODE}\nnode1 -- b -- {NODE}\n\tnode1 -- node9\n",
            'm-pbs-1.txt:2: found "node1", expected a node named once\n'
            'm-pbs-1.txt:3: found "node9", expected a node of this file',
        ),
        (
            f"node1 -- a -- {NODE.replace('=3', '=many')}\n",
            'm-pbs-1.txt:1: activation_size: found "many", expected a number, at least 0',
        ),
        (
            "node1 -- a -- forward_compute_time=1\n",
            "m-pbs-1.txt:1: backward_compute_time: expected a value of backward_compute_time: a number, at least 0",
        ),
        (
            f"node1 -- a -- {NODE}\nnode2 -- b -- {NODE}\n\tnode1 -- node2\n\tnode2 -- node1\n",
            "m-pbs-1.txt: found a cycle through node1, expected a graph without cycles",
        ),
        ("\n", "m-pbs-1.txt: expected at least one node"),
    ],
)
def test_a_broken_text_profile(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "m-pbs-1.txt"
    path.write_text(text)
    assert message(path) == expected


def test_a_text_profile_without_its_batch(tmp_path: Path) -> None:
    path = tmp_path / "m.txt"
    path.write_text(f"node1 -- a -- {NODE}\n")
    assert message(path) == (
        "m.txt: expected the samples per measurement, at least 1, in the file name, as in bert-48-pbs-2.txt; "
        "or pass profile_batch"
    )
    assert read_dapple(path, profile_batch=1)[0].parameters == 1
