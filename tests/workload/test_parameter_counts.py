"""Parameter counts of every preset against the published ones, restated here from model cards and
papers."""

from __future__ import annotations

import tomllib
from importlib.resources import files

import pytest

from argosy.workload.architecture import Experts
from argosy.workload.load import load_architecture, load_model, preset_names

PUBLISHED = {
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "deepseek-v3": 671_026_404_352,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-27b": 27_009_346_304,
    "gemma-3-4b": 3_880_263_168,
    "gpt-neo-2.7b": 2_651_307_520,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama-2-70b": 68_976_648_192,
    "llama-2-7b": 6_738_415_616,
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x7b": 46_702_792_704,
    "olmoe-1b-7b": 6_919_161_856,
    "opt-30b": 29_974_540_288,
    "opt-350m": 331_196_416,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-14b": 14_768_307_200,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "t5-11b": 11_307_321_344,
    "t5-base": 222_903_552,
    "vit-base": 86_567_656,
    "vit-huge": 632_045_800,
}


def test_every_preset_has_a_published_count() -> None:
    assert preset_names() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_count(name: str) -> None:
    assert load_model(name).parameters == PUBLISHED[name]


def test_gpt3_rounds_to_what_its_paper_prints() -> None:
    """Table D.1 of Brown et al. prints 174,600 million."""
    assert round(load_model("gpt3-175b").parameters / 1e6, -2) == 174_600


@pytest.mark.parametrize(
    ("name", "hidden", "count"),
    [("bert-base", 768, 109_482_240), ("bert-large", 1024, 335_141_888)],
)
def test_bert_without_its_training_heads(name: str, hidden: int, count: int) -> None:
    """The count usually quoted is embedding, blocks and pooler."""
    body = sum(layer.parameters for layer in load_model(name).layers[:-1])
    assert body + hidden * hidden + hidden == count


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("mixtral-8x7b", 12_879_925_248),
        ("qwen3-30b-a3b", 3_353_032_704),
        ("olmoe-1b-7b", 1_282_017_280),
    ],
)
def test_active_parameters_of_mixtures(name: str, active: int) -> None:
    """Every weight but those of the experts that a token does not meet."""
    layers = load_model(name).layers
    assert (
        sum(
            layer.parameters if layer.active_parameters is None else layer.active_parameters
            for layer in layers
        )
        == active
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tied_head_counts_its_weights_once(name: str) -> None:
    chain = load_model(name)
    for layer in chain.layers:
        if layer.tied_to is not None:
            assert 0 < layer.tied_parameters <= chain.layers[layer.tied_to].parameters


def test_experts_are_part_of_the_parameters() -> None:
    block = load_model("mixtral-8x7b").layers[1]
    assert block.num_experts == 8
    assert block.expert_parameters == 8 * 3 * 4096 * 14336
    assert block.parameters - block.expert_parameters == 41_943_040 + 8 * 4096 + 2 * 4096


ROTARY = {
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "phi3",
    "olmoe",
    "gemma3_text",
}
ROTARY |= {"deepseek_v3", "gpt_oss"}


@pytest.mark.parametrize("name", preset_names())
def test_presets_state_what_defaults_would_change(name: str) -> None:
    """An export trains the published model only if its angles and norms are the published ones."""
    config = tomllib.loads((files("argosy") / "data" / "models" / f"{name}.toml").read_text())[
        "config"
    ]
    if config["model_type"] in ROTARY:
        assert {"rope_theta", "rms_norm_eps"} <= config.keys()


@pytest.mark.parametrize(
    ("name", "base", "scaling", "epsilon"),
    [
        ("llama-3.1-8b", 5e5, 8.0, 1e-5),
        ("llama-3.2-1b", 5e5, 32.0, 1e-5),
        ("llama-3.3-70b", 5e5, 8.0, 1e-5),
        ("mistral-small-24b", 1e8, None, 1e-5),
        ("qwen2.5-14b", 1e6, None, 1e-5),
        ("qwen2.5-72b", 1e6, None, 1e-5),
        ("qwen3-0.6b", 1e6, None, 1e-6),
        ("qwen3-1.7b", 1e6, None, 1e-6),
        ("qwen3-235b-a22b", 1e6, None, 1e-6),
        ("phi-4", 2.5e5, None, 1e-5),
        ("phi-4-mini", 1e4, None, 1e-5),
        ("gemma-3-1b", 1e6, None, 1e-6),
        ("gemma-3-27b", 1e6, None, 1e-6),
        ("gpt-oss-120b", 1.5e5, None, 1e-5),
        ("deepseek-v3", 1e4, None, 1e-6),
    ],
)
def test_angles_and_norms_are_the_published_ones(
    name: str, base: float, scaling: float | None, epsilon: float
) -> None:
    shape = load_architecture(name)
    assert shape.rotary is not None and (shape.rotary.base, shape.rotary.scaling) == (base, scaling)
    assert shape.norm_epsilon == epsilon


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        ("phi-4-mini", "longrope"),
        ("gemma-3-1b", None),
        ("gemma-3-4b", "linear"),
        ("gemma-3-12b", "linear"),
        ("gemma-3-27b", "linear"),
        ("gpt-oss-20b", "yarn"),
        ("gpt-oss-120b", "yarn"),
        ("deepseek-v3", "yarn"),
    ],
)
def test_other_scalings_of_angles_are_named(name: str, scaling: str | None) -> None:
    rotary = load_architecture(name).rotary
    assert rotary is not None and rotary.other_scaling == scaling


def test_a_part_of_each_head_may_be_rotated() -> None:
    rotary = load_architecture("phi-4-mini").rotary
    assert rotary is not None and rotary.share == 0.75


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3"])
def test_the_weights_of_active_experts_add_up_to_one(name: str) -> None:
    """Megatron's router is written otherwise for experts whose weights do not."""
    part = load_architecture(name).blocks[-1].feed_forward
    assert isinstance(part, Experts) and part.normalized


def test_deepseek_has_three_dense_blocks_and_the_published_active_parameters() -> None:
    """Its report rounds them to 37 billion (arXiv 2412.19437)."""
    layers = load_model("deepseek-v3").layers
    assert [layer.num_experts for layer in layers[1:-1]] == [0] * 3 + [256] * 58
    active = [
        layer.parameters if layer.active_parameters is None else layer.active_parameters
        for layer in layers
    ]
    assert sum(active) // 10**9 == 37
