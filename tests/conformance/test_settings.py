"""Configurations from words."""

from __future__ import annotations

import pytest

from conformance.protocol import ConfigRefused, EngineConfig
from conformance.settings import PRESETS, parse_settings


def test_nothing_set_is_the_default_configuration() -> None:
    assert parse_settings(None, []) == (EngineConfig(), frozenset())


def test_words_get_the_type_of_their_field() -> None:
    config, names = parse_settings(
        None,
        ["num_blocks=7", "watermark=0.1", "enable_prefix_caching=true", "sliding_window=none", "preemption_mode=swap"],
    )
    assert (config.num_blocks, config.watermark, config.enable_prefix_caching) == (7, 0.1, True)
    assert (config.sliding_window, config.preemption_mode) == (None, "swap")
    assert names == {"num_blocks", "watermark", "enable_prefix_caching", "sliding_window", "preemption_mode"}


def test_a_preset_sets_its_fields_and_later_words_win() -> None:
    config, names = parse_settings("neuron", ["num_blocks=5"])
    assert (config.block_size, config.max_model_len, config.num_blocks) == (2048, 2048, 5)
    assert names == set(PRESETS["neuron"].fields)


def test_the_neuron_preset_is_the_seed() -> None:
    config, _ = parse_settings("neuron", [])
    assert config.block_size == config.max_model_len
    assert config.num_blocks == config.max_num_seqs == 4
    assert config.max_num_batched_tokens == config.max_num_seqs * config.max_model_len


def test_a_fixed_batch_takes_blocks_of_a_whole_sequence_unless_they_are_set() -> None:
    assert parse_settings(None, ["fixed_batch=true"])[0].block_size == EngineConfig().max_model_len
    config, names = parse_settings(None, ["fixed_batch=true", "max_model_len=50"])
    assert (config.block_size, sorted(names)) == (50, ["fixed_batch", "max_model_len"])
    assert parse_settings(None, ["fixed_batch=true", "block_size=8"])[0].block_size == 8


def test_options_of_the_engine_go_by_their_prefix() -> None:
    config, names = parse_settings(
        None, ["engine_options.block_manager=v1", "engine_options.depth=2", "engine_options.strict=false"]
    )
    assert config.engine_options == {"block_manager": "v1", "depth": 2, "strict": False}
    assert names == {"engine_options"}


MISTAKES = [
    ("num_blocks", "'num_blocks': expected key=value"),
    ("num_blocks=", "expected key=value"),
    ("=4", "expected key=value"),
    ("num_block=4", "num_block=4: no such field; expected one of block_size"),
    ("kv_cache_groups=3", "no such field"),
    ("num_blocks=four", "num_blocks=four: Expected `int`, got `str`"),
    ("num_blocks=0", "num_blocks=0: expected at least 1, got 0"),
    ("num_swap_blocks=-1", "expected at least 0"),
    ("scheduling_policy=lifo", "scheduling_policy=lifo: Invalid enum value 'lifo'"),
]


@pytest.mark.parametrize(("word", "said"), MISTAKES)
def test_a_mistake_is_named(word: str, said: str) -> None:
    with pytest.raises(ConfigRefused) as caught:
        parse_settings(None, [word])
    assert said in str(caught.value)


def test_an_unknown_preset_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigRefused, match="no preset 'trainium'; expected one of neuron"):
        parse_settings("trainium", [])
