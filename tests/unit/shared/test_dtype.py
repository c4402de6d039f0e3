"""The dtype that "auto" means, by the hardware's facts."""

import pytest

from shared.weights.architectures import choose_dtype


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
