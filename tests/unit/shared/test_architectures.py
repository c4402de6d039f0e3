"""What is known of a model by its configuration: its experts, and the dtype that "auto" means."""

from __future__ import annotations

import pytest

from shared.weights.architectures import (
    TRIED,
    Experts,
    cannot_reload_on_cpu,
    choose_dtype,
    experts_of,
    untested_warning,
)


@pytest.mark.parametrize(
    ("capability", "cpu", "dtype"),
    [
        ((7, 0), True, "float32"),  # V100, in a host whose CPU multiplies bfloat16
        ((7, 5), True, "float32"),  # T4
        ((8, 0), False, "bfloat16"),  # A100
        ((9, 0), False, "bfloat16"),  # H100
        ((10, 0), False, "bfloat16"),  # B200
        (None, True, "bfloat16"),
        (None, False, "float32"),
    ],
)
def test_auto_is_bfloat16_only_where_the_hardware_multiplies_it(capability, cpu, dtype):
    assert choose_dtype("auto", capability=capability, cpu_multiplies_bfloat16=cpu) == dtype


def test_a_dtype_that_was_asked_for_by_name_is_taken():
    asked = choose_dtype("float32", capability=(9, 0), cpu_multiplies_bfloat16=True)
    assert asked == "float32"


MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 100}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"intermediate_size": 100}, None),
        ({"num_experts": None, "intermediate_size": 100}, None),
        ({"num_experts": 8, "enable_moe_block": False}, None),
        (MIXTRAL, Experts(8, 2, 100)),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
            | {"shared_expert_intermediate_size": 30, "intermediate_size": 100},
            Experts(8, 2, 10, 30),
        ),
        (
            {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 10}
            | {"n_shared_experts": 2},
            Experts(64, 6, 10, 20),
        ),
    ],
)
def test_what_a_configuration_says_of_experts(config, expected) -> None:
    assert experts_of(config) == expected


def test_how_many_a_token_goes_to_is_not_guessed() -> None:
    with pytest.raises(KeyError, match="num_experts_per_tok"):
        experts_of({"num_experts": 8, "intermediate_size": 100})


def test_a_mixture_of_experts_that_was_not_tried_is_a_warning() -> None:
    assert untested_warning("m", {"architectures": ["Qwen2ForCausalLM"]}) is None
    assert untested_warning("m", MIXTRAL | {"architectures": [TRIED[0]]}) is None
    said = untested_warning("m", MIXTRAL | {"architectures": ["OlmoeForCausalLM"]})
    assert said is not None
    assert said.startswith(
        "the model 'm' is a mixture of experts of the architecture 'OlmoeForCausalLM', which was "
        "not tested; tested were MixtralForCausalLM and Qwen3MoeForCausalLM"
    )


def test_on_a_cpu_experts_are_exchanged_by_a_new_engine_alone() -> None:
    assert cannot_reload_on_cpu(MIXTRAL, "restart") is None
    assert cannot_reload_on_cpu({"intermediate_size": 8}, "auto") is None
    for config in (MIXTRAL, {"text_config": MIXTRAL}):
        said = cannot_reload_on_cpu(config, "auto")
        assert said is not None and 'weight_sync is "auto", and only "restart" works' in said
